#include "distckpt/plan/box_io.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "distckpt/base/integers.h"

namespace ferry::distckpt {
namespace {

// Copies a matrix whose rows are runs of one side and whose columns are runs of the other: tile by
// tile, so that both sides stay in the cache.
template <std::int64_t kSize>
void transpose(std::byte* to,
               std::int64_t to_row,
               std::int64_t to_column,
               const std::byte* from,
               std::int64_t from_row,
               std::int64_t from_column,
               std::int64_t rows,
               std::int64_t columns) {
  constexpr std::int64_t kTile = 32;
  for (std::int64_t top = 0; top < rows; top += kTile) {
    for (std::int64_t left = 0; left < columns; left += kTile) {
      for (auto r = top; r < std::min(rows, top + kTile); ++r) {
        for (auto c = left; c < std::min(columns, left + kTile); ++c) {
          std::memcpy(to + r * to_row + c * to_column, from + r * from_row + c * from_column,
                      kSize);
        }
      }
    }
  }
}

}  // namespace

std::int64_t Runs::end() const {
  std::int64_t last = offset;
  for (int d = 0; d < counts.rank(); ++d) last += (counts[d] - 1) * strides[d];
  return last + run_bytes;
}

Runs fold_runs(const Region& region) {
  Runs runs{
      .offset = region.at.offset, .run_bytes = region.element_size, .counts = {}, .strides = {}};
  int d = region.size.rank() - 1;
  for (; d >= 0; --d) {
    if (region.size[d] == 1) continue;
    if (region.at.strides[d] != runs.run_bytes) break;
    runs.run_bytes *= region.size[d];
  }
  for (; d >= 0; --d) {
    if (region.size[d] == 1) continue;
    if (!runs.counts.empty() && region.at.strides[d] == runs.strides[0] * runs.counts[0]) {
      runs.counts[0] *= region.size[d];
      continue;
    }
    runs.counts.push_front(region.size[d]);
    runs.strides.push_front(region.at.strides[d]);
  }
  if (region.size.product() == 0) runs.counts = Dims{0}, runs.strides = Dims{0};
  return runs;
}

std::vector<int> order_of_storage(const Dims& strides) {
  std::vector<int> order(static_cast<std::size_t>(strides.rank()));
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, [&](int a, int b) { return strides[a] > strides[b]; });
  return order;
}

Dims reorder(const Dims& dims, const std::vector<int>& order) {
  Dims reordered;
  for (const int d : order) reordered.push_back(dims[d]);
  return reordered;
}

Region reorder(const Region& region, const std::vector<int>& order) {
  auto reordered = region;
  reordered.at.strides = reorder(region.at.strides, order);
  reordered.size = reorder(region.size, order);
  return reordered;
}

Dims packed_strides(const Region& region) {
  return byte_strides(region.size, region.element_size);
}

void copy_strided(std::byte* to,
                  const Dims& to_strides,
                  const std::byte* from,
                  const Dims& from_strides,
                  const Dims& size,
                  std::int64_t element_size) {
  // Fold trailing dimensions that are packed on both sides into one run.
  std::int64_t run = element_size;
  int rank = size.rank();
  for (; rank > 0; --rank) {
    const auto n = size[rank - 1];
    if (n != 1 && (to_strides[rank - 1] != run || from_strides[rank - 1] != run)) break;
    run *= n;
  }
  if (size.product() == 0) return;
  // The dimension along which the source's elements lie closest, where it is another than the
  // target's: both go tile by tile.
  int row = rank - 1;
  for (int d = 0; d < rank; ++d) {
    if (size[d] > 1 && from_strides[d] < from_strides[row]) row = d;
  }
  const bool tiles = rank > 1 && row != rank - 1 && size[rank - 1] > 1 && (run == 2 || run == 4);
  Dims at = Dims::filled(rank, 0);
  while (true) {
    int d = rank - 1;
    if (tiles) {
      const auto copy = run == 2 ? transpose<2> : transpose<4>;
      copy(to, to_strides[row], to_strides[d], from, from_strides[row], from_strides[d], size[row],
           size[d]);
      --d;
    } else {
      std::memcpy(to, from, static_cast<std::size_t>(run));
    }
    for (; d >= 0; --d) {
      if (tiles && d == row) continue;
      to += to_strides[d];
      from += from_strides[d];
      if (++at[d] < size[d]) break;
      to -= to_strides[d] * size[d];
      from -= from_strides[d] * size[d];
      at[d] = 0;
    }
    if (d < 0) return;
  }
}

}  // namespace ferry::distckpt
