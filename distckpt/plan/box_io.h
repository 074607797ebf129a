// The two interfaces an executor works over: give me the bytes of this box; here are the bytes of
// this box. Formats only make Layouts, so one implementation for files and one for memory serve
// them all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "distckpt/base/box.h"
#include "distckpt/plan/layout.h"

namespace ferry::distckpt {

// A box of elements in one storage.
struct Region {
  Placement at{};
  Dims size{};  // elements per dimension
  std::int64_t element_size = 1;

  std::int64_t num_bytes() const { return size.product() * element_size; }
};

// A region as runs of consecutive bytes: dimensions that are packed are folded into the run.
struct Runs {
  std::int64_t offset = 0;     // of the first run
  std::int64_t run_bytes = 0;  // length of each
  Dims counts{};   // runs per remaining dimension, outermost first; empty for a single run
  Dims strides{};  // bytes between them

  std::int64_t num_runs() const { return counts.product(); }
  std::int64_t end() const;  // byte after the last run; strides are not negative
};
Runs fold_runs(const Region& region);

// The dimensions of a region in the order in which its elements lie: by descending strides.
std::vector<int> order_of_storage(const Dims& strides);

// The same elements, dimension i of which is dimension order[i] of `region`; without an order as
// they are.
Region reorder(const Region& region, const std::vector<int>& order);
Dims reorder(const Dims& dims, const std::vector<int>& order);

// The bytes between elements of `region` where they lie row-major and packed.
Dims packed_strides(const Region& region);

// Calls visit(offset of the run, its index) for each run, in row-major order.
template <typename Visit>
void for_each_run(const Runs& runs, Visit&& visit);

// Copies between two regions of memory, both given by their first byte and by strides. Sizes are
// equal.
void copy_strided(std::byte* to,
                  const Dims& to_strides,
                  const std::byte* from,
                  const Dims& from_strides,
                  const Dims& size,
                  std::int64_t element_size);

// The CRC-32 of some bytes of a range that a checksum protects, to be combined with its
// neighbours'.
struct ChecksumPart {
  StorageId storage = 0;
  std::uint32_t crc = 0;
  std::int64_t offset = 0;  // in the storage
  std::int64_t size = 0;
};

class BoxSource {
 public:
  virtual ~BoxSource() = default;

  // Fills `packed`, row-major. Appends the checksums of what it read to `parts`. Thread-safe.
  virtual void read(const Region& region,
                    std::span<std::byte> packed,
                    std::vector<ChecksumPart>& parts) = 0;

  // Takes the checksums of finished reads. Thread-safe.
  virtual void commit(std::span<const ChecksumPart>) {}

  // For messages: the file that a storage is. Empty: it is none.
  virtual std::string name_of(StorageId) const { return {}; }
};

// The bytes of a ComputedStorage.
class ComputedBytes {
 public:
  virtual ~ComputedBytes() = default;

  // Fills `into` with the bytes of that index, from what `source` reads, whose checksums it appends
  // to `parts`: the same reads every time. Thread-safe.
  virtual void compute(std::uint32_t index,
                       BoxSource& source,
                       std::span<std::byte> into,
                       std::vector<ChecksumPart>& parts) const = 0;
};

class BoxSink {
 public:
  virtual ~BoxSink() = default;

  // Writes `packed`, row-major. Appends the checksums of what it wrote to `parts`. Thread-safe for
  // disjoint regions.
  virtual void write(const Region& region,
                     std::span<const std::byte> packed,
                     std::vector<ChecksumPart>& parts) = 0;

  // Room for the bytes of `region`, to be filled row-major and given back by put(), in the place of
  // a write(): the destination itself, or a buffer that a copy to a device may start from at once.
  // Empty: there is none. What is not given back, because of an error, counts as not written.
  // Thread-safe for disjoint regions.
  virtual std::span<std::byte> lease(const Region&) { return {}; }
  virtual void put(const Region&, std::span<std::byte>) {}

  // Called when a task's writes are done, with their checksums. May wait until earlier tasks are
  // done too. Thread-safe.
  virtual void commit(std::span<const ChecksumPart>) {}

  // Not everything will be written: lets go whoever waits in commit(). Thread-safe.
  virtual void cancel() {}
};

template <typename Visit>
void for_each_run(const Runs& runs, Visit&& visit) {
  const int rank = runs.counts.rank();
  if (runs.num_runs() == 0) return;
  Dims at = Dims::filled(rank, 0);
  std::int64_t offset = runs.offset;
  for (std::int64_t index = 0;; ++index) {
    visit(offset, index);
    int d = rank - 1;
    for (; d >= 0; --d) {
      offset += runs.strides[d];
      if (++at[d] < runs.counts[d]) break;
      offset -= runs.strides[d] * runs.counts[d];
      at[d] = 0;
    }
    if (d < 0) return;
  }
}

}  // namespace ferry::distckpt
