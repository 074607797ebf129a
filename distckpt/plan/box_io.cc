#include "distckpt/plan/box_io.h"

#include <cstring>

#include "distckpt/base/integers.h"

namespace ferry::distckpt {

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
    runs.counts.push_front(region.size[d]);
    runs.strides.push_front(region.at.strides[d]);
  }
  if (region.size.product() == 0) runs.counts = Dims{0}, runs.strides = Dims{0};
  return runs;
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
  Dims at = Dims::filled(rank, 0);
  while (true) {
    std::memcpy(to, from, static_cast<std::size_t>(run));
    int d = rank - 1;
    for (; d >= 0; --d) {
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
