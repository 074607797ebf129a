// Boxes in the memory of this rank: what a model's shards are to an executor. The host's; devices'
// memory is handled by whoever knows the device (models/reshard/device_box_io.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "distckpt/plan/box_io.h"
#include "distckpt/plan/layout.h"

namespace ferry::distckpt {

// The memory of a storage. Throws Error(kBug) for one that is none of this rank, or if the region
// leaves it.
const MemoryStorage& memory_of(const std::vector<Storage>& storages, const Region& region);

class MemorySource : public BoxSource {
 public:
  // The memory that the layout names must outlive it.
  explicit MemorySource(const Layout& layout) : storages_(layout.storages()) {}

  void read(const Region& region,
            std::span<std::byte> packed,
            std::vector<ChecksumPart>& parts) override;

 private:
  std::vector<Storage> storages_;
};

// Counts what it writes: nothing is left as it was before.
class MemorySink : public BoxSink {
 public:
  explicit MemorySink(const Layout& layout);

  void write(const Region& region,
             std::span<const std::byte> packed,
             std::vector<ChecksumPart>& parts) override;
  std::span<std::byte> lease(const Region& region) override;  // packed regions: where they lie
  void put(const Region& region, std::span<std::byte> leased) override;

  // Waits until everything has arrived. Throws Error(kBug) that names a shard in the memory of this
  // rank of which some bytes were not written.
  virtual void finish();

 protected:
  const std::vector<Storage>& storages() const { return storages_; }
  void count(const Region& region);

 private:
  struct Shard {
    std::string name{};  // "decoder.layers.0.mlp.linear_fc1.weight [0:8, 0:4]"
    std::int64_t bytes = 0;
    std::atomic<std::int64_t> written = 0;
  };
  std::vector<Storage> storages_;
  std::vector<Shard> shards_;  // by storage
};

}  // namespace ferry::distckpt
