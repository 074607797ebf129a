#include "models/kernels/cuda/cuda_launch.h"
#include "models/kernels/cuda/ordered_columns.cuh"

namespace ferry::models::launch {
namespace {

using Columns = OrderedColumns<1, 12>;

// Blocks of one warp. The kernel behind begins late: its blocks would take the room of this one's.
// A weight of a single tile may be a copy with more lines (gemm_nt()), made right before.
__global__ void __launch_bounds__(kLanes) ordered_rows(
    const Bf16* x, const Bf16* weight, const Bf16* bias, Bf16* y, int rows, int n, int k) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int first = static_cast<int>(blockIdx.x) * kOrderedLines;
  const Bf16* const tiles[] = {weight + static_cast<std::int64_t>(first) * k};
  Columns columns(shared, tiles, n - first, k);
  if (n <= kOrderedLines) wait_for_inputs();
  columns.begin();
  wait_for_inputs();
  const Bf16* of_lane[Columns::kRowsOfLane];
#pragma unroll
  for (int i = 0; i < Columns::kRowsOfLane; ++i) {
    const int row = Columns::row_of_lane(i);
    of_lane[i] = row < rows ? x + static_cast<std::int64_t>(row) * k : nullptr;
  }
  float sums[1][4] = {};
  columns.multiply(of_lane, sums);
  release_dependents();
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const int column = first + Columns::line_of(q);
    const int row = Columns::row_of(q);
    if (column >= n || row >= rows) continue;
    const float sum = sums[0][q];
    y[static_cast<std::int64_t>(row) * n + column] =
        narrow<Bf16>(bias == nullptr ? sum : __fadd_rn(sum, widen(bias[column])));
  }
}

}  // namespace

bool ordered_rows_supported(std::int64_t rows, std::int64_t k) {
  return rows >= 1 && rows <= kOrderedRows && k > 0 && k % kRingChannels == 0;
}

cudaError_t ordered_rows_product(const void* x,
                                 const void* weight,
                                 const void* bias,
                                 void* y,
                                 std::int64_t rows,
                                 std::int64_t n,
                                 std::int64_t k,
                                 cudaStream_t stream) {
  if (!ordered_rows_supported(rows, k)) return cudaErrorInvalidValue;
  return launch_dependent(ordered_rows, static_cast<unsigned>(ceil_div(n, kOrderedLines)), kLanes,
                          Columns::kSharedBytes, stream, static_cast<const Bf16*>(x),
                          static_cast<const Bf16*>(weight), static_cast<const Bf16*>(bias),
                          static_cast<Bf16*>(y), static_cast<int>(rows), static_cast<int>(n),
                          static_cast<int>(k));
}

}  // namespace ferry::models::launch
