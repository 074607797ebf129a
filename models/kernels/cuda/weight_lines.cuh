// Reading rows of weights of bf16 that a product needs once, a warp a row.
#pragma once

#include "models/kernels/cuda/cuda_element.cuh"

namespace ferry::models::launch {

using Bf16 = __nv_bfloat16;

constexpr int kWide = 8;               // numbers of one load
constexpr int kStep = kWide * kLanes;  // of a warp's load
constexpr unsigned kAllLanes = 0xffffffff;

__device__ inline uint4 load_once(const Bf16* from) {  // weights are not read again soon
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from));
  return value;
}

constexpr int kNumbersOfLine = 64;  // of the second cache

__device__ inline void fetch(const void* from) {  // into the second cache
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}
__device__ inline void fetch_row(const Bf16* row, int in) {  // by a warp
  for (int at = static_cast<int>(threadIdx.x) % kLanes * kNumbersOfLine; at < in;
       at += kLanes * kNumbersOfLine)
    fetch(row + at);
}

__device__ inline void unpack(uint4 packed, float (&values)[kWide]) {
  const std::uint32_t pairs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = __uint_as_float(pairs[i] << 16);
    values[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000U);
  }
}

__device__ inline float sum_over_lanes(float sum) {
  for (int offset = kLanes / 2; offset > 0; offset /= 2)
    sum += __shfl_xor_sync(kAllLanes, sum, offset);
  return sum;
}

// A warp's products of rows, each `in` numbers behind the one before, with lines of weights: each
// lane adds up its numbers in their order.
template <int kRows, int kLines>
__device__ inline void multiply(const Bf16* rows,
                                const Bf16* const (&lines)[kLines],
                                int in,
                                float (&sums)[kRows][kLines]) {
#pragma unroll 4
  for (int at = static_cast<int>(threadIdx.x) % kLanes * kWide; at < in; at += kStep) {
    uint4 packed[kLines];
#pragma unroll
    for (int line = 0; line < kLines; ++line) packed[line] = load_once(lines[line] + at);
    float numbers[kRows][kWide];
#pragma unroll
    for (int row = 0; row < kRows; ++row)
      unpack(*reinterpret_cast<const uint4*>(rows + static_cast<std::int64_t>(row) * in + at),
             numbers[row]);
#pragma unroll
    for (int line = 0; line < kLines; ++line) {
      float w[kWide];
      unpack(packed[line], w);
#pragma unroll
      for (int row = 0; row < kRows; ++row)
#pragma unroll
        for (int i = 0; i < kWide; ++i)
          sums[row][line] = __fmaf_rn(numbers[row][i], w[i], sums[row][line]);
    }
  }
#pragma unroll
  for (int row = 0; row < kRows; ++row)
#pragma unroll
    for (int line = 0; line < kLines; ++line) sums[row][line] = sum_over_lanes(sums[row][line]);
}

}  // namespace ferry::models::launch
