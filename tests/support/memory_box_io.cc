#include "tests/support/memory_box_io.h"

#include <algorithm>
#include <variant>

#include "distckpt/base/error.h"

namespace ferry::support {

using distckpt::MemoryStorage;
using distckpt::Region;
using distckpt::Runs;

namespace {

// Calls visit(first byte, offset in the packed bytes, length) for each run of the region.
template <typename Visit>
void for_each_checked_run(const std::vector<distckpt::Storage>& storages,
                          const Region& region,
                          std::int64_t packed_bytes,
                          Visit&& visit) {
  const auto& memory = std::get<MemoryStorage>(storages.at(region.at.storage));
  require(packed_bytes == region.num_bytes(), ErrorKind::kBug, "a region of {} bytes, a span of {}",
          region.num_bytes(), packed_bytes);
  const Runs runs = distckpt::fold_runs(region);
  distckpt::for_each_run(runs, [&](std::int64_t offset, std::int64_t index) {
    require(offset >= 0 && offset <= memory.size - runs.run_bytes, ErrorKind::kBug,
            "bytes {} to {} of a storage of {}", offset, offset + runs.run_bytes, memory.size);
    visit(memory.data + offset, index * runs.run_bytes, runs.run_bytes);
  });
}

}  // namespace

void MemorySource::read(const Region& region,
                        std::span<std::byte> packed,
                        std::vector<distckpt::ChecksumPart>& /*parts*/) {
  const auto before = num_reads_.fetch_add(1);
  if (before_read) before_read(before);
  for_each_checked_run(storages_, region, std::ssize(packed),
                       [&](const std::byte* from, std::int64_t at, std::int64_t length) {
                         std::copy_n(from, length, packed.data() + at);
                       });
  bytes_read_ += region.num_bytes();
}

void MemorySink::write(const Region& region,
                       std::span<const std::byte> packed,
                       std::vector<distckpt::ChecksumPart>& /*parts*/) {
  for_each_checked_run(storages_, region, std::ssize(packed),
                       [&](std::byte* into, std::int64_t at, std::int64_t length) {
                         std::copy_n(packed.data() + at, length, into);
                       });
  bytes_written_ += region.num_bytes();
}

}  // namespace ferry::support
