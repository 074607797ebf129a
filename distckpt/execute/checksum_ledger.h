// CRC-32s of byte ranges that are read or written in parts, by many threads, in any order: the
// parts' checksums are combined. torch.save archives carry one per record; nobody else checks them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "distckpt/plan/box_io.h"
#include "distckpt/plan/layout.h"

namespace ferry::distckpt {

// Bytes of a storage that one checksum covers.
struct ChecksumRange {
  StorageId storage = 0;
  std::int64_t offset = 0;
  std::int64_t size = 0;
};

class ChecksumLedger {
 public:
  // Ranges of one storage do not overlap. The index of the range.
  std::uint32_t add_range(const ChecksumRange& range);

  const std::vector<ChecksumRange>& ranges() const { return ranges_; }

  // The checksums of `bytes`, which lie at `offset` of `storage`, in the ranges they meet. Call
  // seal() first.
  void checksum(StorageId storage,
                std::int64_t offset,
                std::span<const std::byte> bytes,
                std::vector<ChecksumPart>& parts) const;
  void seal();

  void commit(std::span<const ChecksumPart> parts);  // thread-safe

  // The checksum of a range, once its parts cover it; nothing before, nor where two of them overlap
  // in part. Two tensors may share bytes, which are then read twice: the first reading counts.
  std::optional<std::uint32_t> combined(std::uint32_t range);

 private:
  // The parts of a range that were committed. A tensor that lies transposed comes as a run of a few
  // hundred bytes for each of its rows, so that runs are joined as soon as they lie side by side.
  struct Parts {
    std::vector<ChecksumPart> parts{};
    std::size_t joined = 0;  // how many were left by the last join()
    void join();
  };

  // The position in order_ of the last range that begins at or before `offset` of `storage` (or 0).
  std::size_t first_candidate(StorageId storage, std::int64_t offset) const;

  std::vector<ChecksumRange> ranges_;
  std::vector<std::uint32_t> order_;  // by storage and offset
  std::mutex mutex_;
  std::vector<Parts> parts_;  // per range
};

}  // namespace ferry::distckpt
