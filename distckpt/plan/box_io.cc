#include "distckpt/plan/box_io.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <numeric>

#include "distckpt/base/integers.h"

namespace ferry::distckpt {
namespace {

// Sixteen bytes of two-byte elements.
using Lane [[gnu::vector_size(16)]] = std::uint16_t;
constexpr std::int64_t kLanes = 8;

// Eight rows of eight elements each, columns from then on.
inline void transpose_lanes(Lane (&m)[kLanes]) {
  Lane a[kLanes];
  for (int i = 0; i < 4; ++i) {  // pairs of rows i and i + 4, element by element
    a[2 * i] = __builtin_shufflevector(m[i], m[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
    a[2 * i + 1] = __builtin_shufflevector(m[i], m[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
  }
  for (int i = 0; i < 4; ++i) {
    m[2 * i] = __builtin_shufflevector(a[i], a[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
    m[2 * i + 1] = __builtin_shufflevector(a[i], a[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
  }
  for (int i = 0; i < 4; ++i) {
    a[2 * i] = __builtin_shufflevector(m[i], m[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
    a[2 * i + 1] = __builtin_shufflevector(m[i], m[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
  }
  std::copy(std::begin(a), std::end(a), m);
}

struct Matrix {
  std::byte* to = nullptr;
  std::int64_t to_row = 0;
  std::int64_t to_column = 0;
  const std::byte* from = nullptr;
  std::int64_t from_row = 0;
  std::int64_t from_column = 0;
};

template <std::int64_t kSize>
void transpose_tile(const Matrix& m, std::int64_t rows, std::int64_t columns) {
  std::int64_t whole_rows = 0;
  std::int64_t whole_columns = 0;
  if constexpr (kSize == sizeof(std::uint16_t)) {
    if (m.to_column == kSize && m.from_row == kSize) {
      whole_rows = rows / kLanes * kLanes;
      whole_columns = columns / kLanes * kLanes;
      for (std::int64_t r = 0; r < whole_rows; r += kLanes) {
        for (std::int64_t c = 0; c < whole_columns; c += kLanes) {
          Lane lanes[kLanes];
          for (int i = 0; i < kLanes; ++i)
            std::memcpy(&lanes[i], m.from + r * kSize + (c + i) * m.from_column, sizeof(Lane));
          transpose_lanes(lanes);
          for (int i = 0; i < kLanes; ++i)
            std::memcpy(m.to + (r + i) * m.to_row + c * kSize, &lanes[i], sizeof(Lane));
        }
      }
    }
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = r < whole_rows ? whole_columns : 0; c < columns; ++c)
      std::memcpy(m.to + r * m.to_row + c * m.to_column,
                  m.from + r * m.from_row + c * m.from_column, kSize);
  }
}

// Copies a matrix whose rows are runs of one side and whose columns are runs of the other: tile by
// tile, so that both sides stay in the cache.
template <std::int64_t kSize>
void transpose(const Matrix& whole, std::int64_t rows, std::int64_t columns) {
  constexpr std::int64_t kColumns = 64 / kSize;  // a line of the cache
  constexpr std::int64_t kRows = 4 * kColumns;   // each column lies in a page of its own
  for (std::int64_t top = 0; top < rows; top += kRows) {
    for (std::int64_t left = 0; left < columns; left += kColumns) {
      auto tile = whole;
      tile.to += top * whole.to_row + left * whole.to_column;
      tile.from += top * whole.from_row + left * whole.from_column;
      transpose_tile<kSize>(tile, std::min(kRows, rows - top), std::min(kColumns, columns - left));
    }
  }
}

// Dimensions of both sides, in the order in which the elements of the target lie, with those made
// one that lie alike on both: a dimension whose elements are as far apart as the next one is long.
struct Strided {
  Dims to{};
  Dims from{};
  Dims size{};
};

Strided fold(const Dims& to, const Dims& from, const Dims& size) {
  Strided folded;
  for (const int d : order_of_storage(to)) {
    if (size[d] == 1) continue;
    const int last = folded.size.rank() - 1;
    if (last >= 0 && folded.to[last] == to[d] * size[d] && folded.from[last] == from[d] * size[d]) {
      folded.size[last] *= size[d];
      folded.to[last] = to[d];
      folded.from[last] = from[d];
      continue;
    }
    folded.size.push_back(size[d]);
    folded.to.push_back(to[d]);
    folded.from.push_back(from[d]);
  }
  return folded;
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
  if (order.empty()) return dims;
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
  if (size.product() == 0) return;
  const auto folded = fold(to_strides, from_strides, size);
  int rank = folded.size.rank();
  std::int64_t run = element_size;
  if (rank > 0 && folded.to[rank - 1] == run && folded.from[rank - 1] == run)
    run *= folded.size[--rank];
  // The dimension along which the source's elements lie closest, where it is another than the
  // target's: both go tile by tile.
  const int column = rank - 1;
  int row = column;
  for (int d = 0; d < rank; ++d) {
    if (folded.from[d] < folded.from[row]) row = d;
  }
  const bool tiles = row != column && (run == 2 || run == 4);
  Dims at = Dims::filled(rank, 0);
  while (true) {
    if (tiles) {
      const auto copy = run == 2 ? transpose<2> : transpose<4>;
      copy({.to = to,
            .to_row = folded.to[row],
            .to_column = folded.to[column],
            .from = from,
            .from_row = folded.from[row],
            .from_column = folded.from[column]},
           folded.size[row], folded.size[column]);
    } else {
      std::memcpy(to, from, static_cast<std::size_t>(run));
    }
    int d = rank - 1;
    for (; d >= 0; --d) {
      if (tiles && (d == row || d == column)) continue;
      to += folded.to[d];
      from += folded.from[d];
      if (++at[d] < folded.size[d]) break;
      to -= folded.to[d] * folded.size[d];
      from -= folded.from[d] * folded.size[d];
      at[d] = 0;
    }
    if (d < 0) return;
  }
}

}  // namespace ferry::distckpt
