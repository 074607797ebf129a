// Boxes in memory: a BoxSource and a BoxSink over a Layout's MemoryStorages. They check that no
// byte outside a storage is touched, and count.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "distckpt/plan/box_io.h"
#include "distckpt/plan/layout.h"

namespace ferry::support {

class MemorySource : public distckpt::BoxSource {
 public:
  explicit MemorySource(const distckpt::Layout& layout) : storages_(layout.storages()) {}

  // Called before each read with the number of reads before it. What it throws, the read throws.
  std::function<void(std::int64_t)> before_read;

  void read(const distckpt::Region& region,
            std::span<std::byte> packed,
            std::vector<distckpt::ChecksumPart>& parts) override;

  std::int64_t num_reads() const { return num_reads_; }
  std::int64_t bytes_read() const { return bytes_read_; }

 private:
  std::vector<distckpt::Storage> storages_;
  std::atomic<std::int64_t> num_reads_ = 0;
  std::atomic<std::int64_t> bytes_read_ = 0;
};

class MemorySink : public distckpt::BoxSink {
 public:
  explicit MemorySink(const distckpt::Layout& layout) : storages_(layout.storages()) {}

  void write(const distckpt::Region& region,
             std::span<const std::byte> packed,
             std::vector<distckpt::ChecksumPart>& parts) override;

  std::int64_t bytes_written() const { return bytes_written_; }

 private:
  std::vector<distckpt::Storage> storages_;
  std::atomic<std::int64_t> bytes_written_ = 0;
};

}  // namespace ferry::support
