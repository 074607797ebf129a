#include "models/kernels/cuda/cuda_launch.h"
#include "models/kernels/cuda/weight_lines.cuh"

namespace ferry::models::launch {
namespace {

constexpr int kWarps = 8;

// A warp multiplies all rows by kColumns lines of the weight. The kernel behind begins late: its
// blocks, and those behind them, would take the room of this one's.
template <int kRows, int kColumns, typename Y>
__global__ void __launch_bounds__(kWarps* kLanes, 3)
    multiply_rows(const Bf16* x, const Bf16* weight, const Bf16* bias, Y* y, int n, int k) {
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
          narrow<Y>(bias == nullptr ? sums[row][line] : __fadd_rn(sums[row][line], more));
  }
}

// More columns than warps find room at once for.
constexpr std::int64_t kMostSingle = 4096;

template <int kRows, typename Y>
cudaError_t run(const Bf16* x,
                const Bf16* weight,
                const Bf16* bias,
                Y* y,
                std::int64_t n,
                std::int64_t k,
                cudaStream_t stream) {
  const auto launch = [&](auto* kernel, int columns) {
    return launch_dependent(kernel, static_cast<unsigned>(ceil_div(n, columns * kWarps)),
                            kWarps * kLanes, 0, stream, x, weight, bias, y, static_cast<int>(n),
                            static_cast<int>(k));
  };
  return n <= kMostSingle ? launch(multiply_rows<kRows, 1, Y>, 1)
                          : launch(multiply_rows<kRows, 2, Y>, 2);
}

template <typename Y>
cudaError_t run_rows(const void* x,
                     const void* weight,
                     const void* bias,
                     void* y,
                     std::int64_t rows,
                     std::int64_t n,
                     std::int64_t k,
                     cudaStream_t stream) {
  const auto run_some = [&](auto count) {
    return run<decltype(count)::value>(
        static_cast<const Bf16*>(x), static_cast<const Bf16*>(weight),
        static_cast<const Bf16*>(bias), static_cast<Y*>(y), n, k, stream);
  };
  switch (rows) {
    case 1:
      return run_some(std::integral_constant<int, 1>{});
    case 2:
      return run_some(std::integral_constant<int, 2>{});
    case 3:
      return run_some(std::integral_constant<int, 3>{});
    case 4:
      return run_some(std::integral_constant<int, 4>{});
    default:
      return cudaErrorInvalidValue;
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
  return run_rows<Bf16>(x, weight, bias, y, rows, n, k, stream);
}
cudaError_t few_rows_product_in_fp32(const void* x,
                                     const void* weight,
                                     const void* bias,
                                     void* y,
                                     std::int64_t rows,
                                     std::int64_t n,
                                     std::int64_t k,
                                     cudaStream_t stream) {
  return run_rows<float>(x, weight, bias, y, rows, n, k, stream);
}

}  // namespace ferry::models::launch
