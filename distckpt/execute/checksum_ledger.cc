#include "distckpt/execute/checksum_ledger.h"

#include <zlib.h>

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/elements/crc32.h"

namespace ferry::distckpt {
namespace {

constexpr std::size_t kFewestToJoin = 1024;

}  // namespace

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
    auto& of_range = parts_[order_[at]];
    of_range.parts.push_back(part);
    if (of_range.parts.size() >= std::max(kFewestToJoin, 2 * of_range.joined)) of_range.join();
  }
}

void ChecksumLedger::Parts::join() {
  std::ranges::sort(parts, {}, [](const ChecksumPart& part) {
    return std::tuple(part.offset, part.size, part.crc);
  });
  std::size_t last = 0;
  for (std::size_t i = 1; i < parts.size(); ++i) {
    const auto& part = parts[i];
    auto& before = parts[last];
    const auto end = before.offset + before.size;
    if (part.offset + part.size <= end) continue;  // read again
    if (part.offset == end) {
      before.crc = static_cast<std::uint32_t>(crc32_combine(before.crc, part.crc, part.size));
      before.size += part.size;
    } else {
      parts[++last] = part;
    }
  }
  if (!parts.empty()) parts.resize(last + 1);
  joined = parts.size();
  if (parts.capacity() > 4 * std::max(joined, kFewestToJoin)) parts.shrink_to_fit();
}

std::optional<std::uint32_t> ChecksumLedger::combined(std::uint32_t range) {
  const std::lock_guard lock(mutex_);
  auto& of_range = parts_.at(range);
  of_range.join();
  const auto& whole = ranges_[range];
  if (whole.size == 0) return 0;
  const auto& parts = of_range.parts;
  const bool covered =
      parts.size() == 1 && parts[0].offset == whole.offset && parts[0].size == whole.size;
  return covered ? std::optional(parts[0].crc) : std::nullopt;
}

}  // namespace ferry::distckpt
