#include "models/kernels/cuda/cuda_launch.h"
#include "models/kernels/cuda/weight_lines.cuh"

namespace ferry::models::launch {
namespace {

constexpr int kWarps = 8;

// A warp multiplies all rows by kColumns lines of the weight. The kernel behind begins late: its
// blocks, and those behind them, would take the room of this one's.
template <int kRows, int kColumns>
__global__ void __launch_bounds__(kWarps* kLanes, 3)
    multiply_rows(const Bf16* x, const Bf16* weight, const Bf16* bias, Bf16* y, int n, int k) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  const int first = (static_cast<int>(blockIdx.x) * kWarps + warp) * kColumns;
  const Bf16* lines[kColumns];
#pragma unroll
  for (int line = 0; line < kColumns; ++line)
    lines[line] = weight + static_cast<std::int64_t>(min(first + line, n - 1)) * k;
  wait_for_inputs();
  float sums[kRows][kColumns] = {};
  multiply(x, lines, k, sums);
  release_dependents();
#pragma unroll
  for (int line = 0; line < kColumns; ++line) {
    const int column = first + line;
    if (lane != line || column >= n) continue;
    const float more = bias == nullptr ? 0.0F : widen(bias[column]);
#pragma unroll
    for (int row = 0; row < kRows; ++row)
      y[static_cast<std::int64_t>(row) * n + column] =
          narrow<Bf16>(bias == nullptr ? sums[row][line] : __fadd_rn(sums[row][line], more));
  }
}

}  // namespace

cudaError_t few_rows_product(const void* x,
                             const void* weight,
                             const void* bias,
                             void* y,
                             std::int64_t rows,
                             std::int64_t n,
                             std::int64_t k,
                             cudaStream_t stream) {
  // More columns than warps find room at once for.
  constexpr std::int64_t kMostSingle = 4096;
  const auto run = [&](auto* kernel, int columns) {
    return launch_dependent(kernel, static_cast<unsigned>(ceil_div(n, columns * kWarps)),
                            kWarps * kLanes, 0, stream, static_cast<const Bf16*>(x),
                            static_cast<const Bf16*>(weight), static_cast<const Bf16*>(bias),
                            static_cast<Bf16*>(y), static_cast<int>(n), static_cast<int>(k));
  };
  const auto run_rows = [&](auto* single, auto* pair) {
    return n <= kMostSingle ? run(single, 1) : run(pair, 2);
  };
  switch (rows) {
    case 1:
      return run_rows(multiply_rows<1, 1>, multiply_rows<1, 2>);
    case 2:
      return run_rows(multiply_rows<2, 1>, multiply_rows<2, 2>);
    case 3:
      return run_rows(multiply_rows<3, 1>, multiply_rows<3, 2>);
    case 4:
      return run_rows(multiply_rows<4, 1>, multiply_rows<4, 2>);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace ferry::models::launch
