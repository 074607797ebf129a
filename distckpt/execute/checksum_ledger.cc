#include "distckpt/execute/checksum_ledger.h"

#include <zlib.h>

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/elements/crc32.h"

namespace ferry::distckpt {
std::uint32_t ChecksumLedger::add_range(const ChecksumRange& range) {
  ranges_.push_back(range);
  parts_.emplace_back();
  return static_cast<std::uint32_t>(ranges_.size() - 1);
}

void ChecksumLedger::seal() {
  order_.resize(ranges_.size());
  std::iota(order_.begin(), order_.end(), 0U);
  // An empty range before the one that begins where it does: bytes are looked up from the last.
  std::ranges::sort(order_, {}, [&](std::uint32_t i) {
    return std::tuple(ranges_[i].storage, ranges_[i].offset, ranges_[i].size);
  });
}

std::size_t ChecksumLedger::first_candidate(StorageId storage, std::int64_t offset) const {
  require(order_.size() == ranges_.size(), ErrorKind::kBug, "the ledger is not sealed");
  const auto at = std::ranges::upper_bound(
      order_, std::pair(storage, offset), {},
      [&](std::uint32_t i) { return std::pair(ranges_[i].storage, ranges_[i].offset); });
  const auto index = static_cast<std::size_t>(at - order_.begin());
  return index == 0 ? 0 : index - 1;
}

void ChecksumLedger::checksum(StorageId storage,
                              std::int64_t offset,
                              std::span<const std::byte> bytes,
                              std::vector<ChecksumPart>& parts) const {
  const auto end = offset + static_cast<std::int64_t>(bytes.size());
  for (auto at = first_candidate(storage, offset); at < order_.size(); ++at) {
    const auto& range = ranges_[order_[at]];
    if (std::pair(range.storage, range.offset) >= std::pair(storage, end)) break;
    if (range.storage < storage) continue;
    const auto from = std::max(offset, range.offset);
    const auto to = std::min(end, range.offset + range.size);
    if (from >= to) continue;
    const auto part =
        bytes.subspan(static_cast<std::size_t>(from - offset), static_cast<std::size_t>(to - from));
    parts.push_back({.storage = storage, .crc = crc32(part), .offset = from, .size = to - from});
  }
}

void ChecksumLedger::commit(std::span<const ChecksumPart> parts) {
  const std::lock_guard lock(mutex_);
  for (const auto& part : parts) {
    const auto at = first_candidate(part.storage, part.offset);
    require(at < order_.size(), ErrorKind::kBug, "a checksum of no range");
    parts_[order_[at]].push_back(part);
  }
}

std::optional<std::uint32_t> ChecksumLedger::combined(std::uint32_t range) {
  const std::lock_guard lock(mutex_);
  auto& parts = parts_.at(range);
  // Two tensors may share their bytes, which are read twice then.
  const auto key = [](const ChecksumPart& part) {
    return std::tuple(part.offset, part.size, part.crc);
  };
  std::ranges::sort(parts, {}, key);
  const auto repeats = std::ranges::unique(parts, {}, key);
  parts.erase(repeats.begin(), repeats.end());
  std::int64_t done = ranges_[range].offset;
  uLong crc = 0;
  for (const auto& part : parts) {
    if (part.offset != done) return std::nullopt;
    crc = crc32_combine(crc, part.crc, part.size);
    done += part.size;
  }
  if (done != ranges_[range].offset + ranges_[range].size) return std::nullopt;
  return static_cast<std::uint32_t>(crc);
}

}  // namespace ferry::distckpt
