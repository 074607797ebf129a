#include "models/kernels/cuda_element.cuh"

// Each weight is read once, by whole lines, as much of it at a time as hides the memory's latency:
// a warp, or, of long rows, four of them, sums two rows of the weight.
namespace ferry::models::launch {
namespace {

using Bf16 = __nv_bfloat16;

constexpr int kLanes = 32;
constexpr int kWarps = 4;
constexpr int kVector = 8;  // of 16 bytes
constexpr int kRows = 2;    // of the weight
constexpr std::int64_t kLongRow = 4096;

// Read once: not kept in the first cache.
__device__ Vector<Bf16, kVector> stream(const Bf16* x) {
  const auto raw = __ldcs(reinterpret_cast<const uint4*>(x));
  return reinterpret_cast<const Vector<Bf16, kVector>&>(raw);
}

template <int kM, int kSplit>
__global__ __launch_bounds__(kWarps* kLanes) void multiply(const Bf16* __restrict__ x,
                                                           const Bf16* __restrict__ weight,
                                                           const Bf16* __restrict__ bias,
                                                           Bf16* __restrict__ y,
                                                           GemvShape shape) {
  __shared__ float partial[kWarps][kM * kRows];
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int part = warp % kSplit;
  const std::int64_t row =
      (static_cast<std::int64_t>(blockIdx.x) * (kWarps / kSplit) + warp / kSplit) * kRows;
  const bool both = row + 1 < shape.n;
  float sums[kM][kRows] = {};
  if (row < shape.n) {
    const auto* const first = weight + row * shape.k;
    const auto* const second = both ? first + shape.k : first;
#pragma unroll 4
    for (std::int64_t c = (part * kLanes + lane) * kVector; c < shape.k;
         c += kSplit * kLanes * kVector) {
      const Vector<Bf16, kVector> w[kRows] = {stream(first + c), stream(second + c)};
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        const auto in = load<kVector>(x + m * shape.k + c);
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
#pragma unroll
          for (int r = 0; r < kRows; ++r)
            sums[m][r] = fmaf(widen(in.at[i]), widen(w[r].at[i]), sums[m][r]);
        }
      }
    }
  }
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      for (int distance = kLanes / 2; distance > 0; distance /= 2)
        sums[m][r] += __shfl_xor_sync(0xffffffffu, sums[m][r], distance);
      if (kSplit > 1 && lane == 0) partial[warp][m * kRows + r] = sums[m][r];
    }
  }
  if (kSplit > 1) {
    __syncthreads();
    if (part != 0) return;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        for (int other = 1; other < kSplit; ++other)
          sums[m][r] += partial[warp + other][m * kRows + r];
      }
    }
  }
  if (lane != 0 || row >= shape.n) return;
  for (int m = 0; m < kM; ++m) {
    for (int r = 0; r < (both ? kRows : 1); ++r) {
      const float add = bias == nullptr ? 0 : widen(bias[row + r]);
      y[m * shape.n + row + r] = narrow<Bf16>(sums[m][r] + add);
    }
  }
}

}  // namespace

cudaError_t gemv(const void* x,
                 const void* weight,
                 const void* bias,
                 void* y,
                 GemvShape shape,
                 cudaStream_t stream) {
  const auto run = [&](auto rows, auto split) {
    constexpr int kM = decltype(rows)::value;
    constexpr int kSplit = decltype(split)::value;
    constexpr int kOfBlock = kWarps / kSplit * kRows;
    multiply<kM, kSplit>
        <<<static_cast<unsigned>((shape.n + kOfBlock - 1) / kOfBlock), kWarps * kLanes, 0,
           stream>>>(static_cast<const Bf16*>(x), static_cast<const Bf16*>(weight),
                     static_cast<const Bf16*>(bias), static_cast<Bf16*>(y), shape);
  };
  const auto of_rows = [&](auto rows) {
    if (shape.k >= kLongRow)
      run(rows, std::integral_constant<int, kWarps>{});
    else
      run(rows, std::integral_constant<int, 1>{});
  };
  switch (shape.m) {
    case 1:
      of_rows(std::integral_constant<int, 1>{});
      break;
    case 2:
      of_rows(std::integral_constant<int, 2>{});
      break;
    case 3:
      of_rows(std::integral_constant<int, 3>{});
      break;
    case 4:
      of_rows(std::integral_constant<int, 4>{});
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

}  // namespace ferry::models::launch
