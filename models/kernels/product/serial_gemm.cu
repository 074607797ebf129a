#include "distckpt/base/integers.h"
#include "models/kernels/cuda/cuda_launch.h"

namespace ferry::models::launch {
namespace {

constexpr int kTile = 64;   // rows and columns of a block
constexpr int kDepth = 16;  // of K at a time
constexpr int kEach = 4;    // rows and columns of a thread
constexpr int kSide = kTile / kEach;

// Blocks and threads divide rows and columns, never K.
__global__ void chain(const float* x,
                      const float* w,
                      const float* bias,
                      float* y,
                      std::int64_t m,
                      std::int64_t n,
                      std::int64_t k) {
  __shared__ float xs[kDepth][kTile + 4];
  __shared__ float ws[kDepth][kTile + 4];
  const std::int64_t row0 = static_cast<std::int64_t>(blockIdx.y) * kTile;
  const std::int64_t column0 = static_cast<std::int64_t>(blockIdx.x) * kTile;
  const int tx = static_cast<int>(threadIdx.x) % kSide;
  const int ty = static_cast<int>(threadIdx.x) / kSide;
  float sums[kEach][kEach] = {};
  for (std::int64_t k0 = 0; k0 < k; k0 += kDepth) {
    for (int i = static_cast<int>(threadIdx.x); i < kTile * kDepth; i += kSide * kSide) {
      const int line = i / kDepth;
      const int at = i % kDepth;
      const bool inside = k0 + at < k;
      xs[at][line] = inside && row0 + line < m ? x[(row0 + line) * k + k0 + at] : 0.0F;
      ws[at][line] = inside && column0 + line < n ? w[(column0 + line) * k + k0 + at] : 0.0F;
    }
    __syncthreads();
    const int depth = static_cast<int>(min(static_cast<std::int64_t>(kDepth), k - k0));
    for (int at = 0; at < depth; ++at)
      for (int i = 0; i < kEach; ++i)
        for (int j = 0; j < kEach; ++j)
          sums[i][j] = __fmaf_rn(xs[at][ty * kEach + i], ws[at][tx * kEach + j], sums[i][j]);
    __syncthreads();
  }
  for (int i = 0; i < kEach; ++i)
    for (int j = 0; j < kEach; ++j) {
      const std::int64_t row = row0 + ty * kEach + i;
      const std::int64_t column = column0 + tx * kEach + j;
      if (row >= m || column >= n) continue;
      y[row * n + column] = bias == nullptr ? sums[i][j] : __fadd_rn(sums[i][j], bias[column]);
    }
}

}  // namespace

cudaError_t serial_gemm(const float* x,
                        const float* w,
                        const float* bias,
                        float* y,
                        std::int64_t m,
                        std::int64_t n,
                        std::int64_t k,
                        cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(distckpt::ceil_div(n, kTile)),
                  static_cast<unsigned>(distckpt::ceil_div(m, kTile)));
  chain<<<grid, kSide * kSide, 0, stream>>>(x, w, bias, y, m, n, k);
  return cudaGetLastError();
}

}  // namespace ferry::models::launch
