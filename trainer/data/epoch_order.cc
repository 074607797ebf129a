#include "trainer/data/epoch_order.h"

#include <algorithm>
#include <numeric>

#include "distckpt/base/error.h"

namespace ferry::trainer {
namespace {

constexpr std::uint64_t kChunks = 0;  // numbers of the keys that an epoch's key is split into
constexpr std::uint64_t kWindows = 1;

// The index of the last of these that is not after the position.
template <typename Items, typename Begin>
std::size_t last_not_after(const Items& items, std::int64_t position, Begin begin) {
  const auto after = std::ranges::upper_bound(items, position, {}, begin);
  return static_cast<std::size_t>(after - items.begin()) - 1;
}

}  // namespace

EpochOrder::EpochOrder(std::span<const ChunkSize> chunks,
                       const OrderOptions& options,
                       std::int64_t epoch)
    : chunks_(chunks.size()) {
  std::iota(chunks_.begin(), chunks_.end(), std::size_t{0});
  const auto key = derive(mix64(options.seed), static_cast<std::uint64_t>(epoch));
  if (options.shuffle) {
    const Permutation permuted(chunks.size(), derive(key, kChunks));
    for (std::size_t i = 0; i < chunks_.size(); ++i) chunks_[i] = permuted(i);
  }
  std::int64_t begin = 0;
  for (const auto chunk : chunks_) {
    begins_.push_back(begin);
    begin += chunks[chunk].num_records;
  }
  begins_.push_back(begin);
  for (std::size_t first = 0; options.shuffle && first < chunks_.size();) {
    auto bytes = chunks[chunks_[first]].num_bytes;
    auto last = first + 1;
    while (last < chunks_.size() &&
           bytes + chunks[chunks_[last]].num_bytes <= options.shuffle_buffer_bytes)
      bytes += chunks[chunks_[last++]].num_bytes;
    windows_.push_back(
        {.begin = begins_[first],
         .order = Permutation(static_cast<std::uint64_t>(begins_[last] - begins_[first]),
                              derive(derive(key, kWindows), windows_.size()))});
    first = last;
  }
}

EpochOrder::Place EpochOrder::at(std::int64_t position) const {
  require(position >= 0 && position < size(), ErrorKind::kBug, "position {} is not of the {}",
          position, size());
  std::size_t window = 0;
  if (!windows_.empty()) {
    window = last_not_after(windows_, position, &Window::begin);
    const auto& [begin, order] = windows_[window];
    position =
        begin + static_cast<std::int64_t>(order(static_cast<std::uint64_t>(position - begin)));
  }
  const auto index = last_not_after(begins_, position, std::identity());
  if (windows_.empty()) window = index;
  return {.window = window, .chunk = chunks_[index], .row = position - begins_[index]};
}

}  // namespace ferry::trainer
