// Functions that the kernels of single tokens and of whole sequences share, so that both have the
// same bits: no expression here leaves a choice to the compiler.
#pragma once

#include "models/kernels/cuda/cuda_element.cuh"
#include "models/kernels/cuda/gated_units.cuh"
#include "models/kernels/delta/delta_launch.h"

namespace ferry::models::launch {

using Bf16 = __nv_bfloat16;

constexpr int kDim = static_cast<int>(kDeltaDim);
// Sums over keys are this many chains of fused multiply-adds, which are added in their order.
constexpr int kChains = 4;
constexpr int kKeysOfChain = kDim / kChains;
constexpr int kOfLane = kDim / kLanes;  // channels
constexpr unsigned kAllLanes = 0xffffffff;
static_assert(kOfLane == 4, "a lane reads its channels at once");

// A channel's convolution: `tokens` up to the one that it is of.
template <int kTaps>
__device__ Bf16 convolved(const Bf16 (&tokens)[kTaps], const Bf16* weight) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kTaps; ++i) sum = __fmaf_rn(widen(tokens[i]), widen(weight[i]), sum);
  return narrow<Bf16>(silu(rounded<Bf16>(sum)));
}

__device__ inline float sum_of_warp(float value) {
  for (int offset = kLanes / 2; offset > 0; offset /= 2)
    value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}

__device__ inline float sum_of_squares(const float (&of_lane)[kOfLane]) {
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) squares = __fmaf_rn(of_lane[i], of_lane[i], squares);
  return sum_of_warp(squares);
}

// The factor that norms a key; a query's is scaled besides.
__device__ inline float key_factor(const Vector<Bf16, kOfLane>& of_lane) {
  float wide[kOfLane];
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) wide[i] = widen(of_lane.at[i]);
  return rsqrtf(sum_of_squares(wide) + 1e-6F);
}
__device__ inline float query_factor(const Vector<Bf16, kOfLane>& of_lane) {
  constexpr float kScale = 0.088388347648318447F;  // 1 / sqrt(kDim)
  return key_factor(of_lane) * kScale;
}

// The decay of a head's state at a token, and how much of the old value is replaced.
__device__ inline float2 decay_and_beta(const DeltaTokens& all, std::int64_t row, int head) {
  const std::int64_t at = row * all.heads + head;
  const float x = widen(static_cast<const Bf16*>(all.alpha)[at]) + all.dt_bias[head];
  const float softplus = x > 20 ? x : log1pf(::expf(x));
  const float beta = 1.0F / (1.0F + ::expf(-widen(static_cast<const Bf16*>(all.beta)[at])));
  return {::expf(-::expf(all.a_log[head]) * softplus), rounded<Bf16>(beta)};
}

// Norms a head's result at a token by one warp, and gates it, with the roundings of
// gated_rms_norm().
__device__ inline void norm_and_gate(
    const DeltaTokens& all, std::int64_t row, int head, int lane, const float (&result)[kOfLane]) {
  const std::int64_t at = (row * all.heads + head) * kDim + lane * kOfLane;
  const auto gates = load<kOfLane>(static_cast<const Bf16*>(all.gate) + at);
  const float inverse = rsqrtf(__fmaf_rn(sum_of_squares(result), 1.0F / kDim, all.epsilon));
  Vector<Bf16, kOfLane> y;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    const float weight = rounded<Bf16>(all.norm[lane * kOfLane + i] + 1.0F);
    const float normed = rounded<Bf16>(weight * rounded<Bf16>(result[i] * inverse));
    y.at[i] = narrow<Bf16>(normed * silu(widen(gates.at[i])));
  }
  store(static_cast<Bf16*>(all.output) + at, y);
}

// Calls run(taps), a constant of the compiler.
template <typename Run>
cudaError_t with_taps(int taps, const Run& run) {
  if (taps == 2) return run(std::integral_constant<int, 2>{});
  if (taps == 3) return run(std::integral_constant<int, 3>{});
  if (taps == 4) return run(std::integral_constant<int, 4>{});
  return cudaErrorInvalidValue;
}

inline int channels_of(const DeltaTokens& all) {
  return (2 * all.key_heads + all.heads) * kDim;
}

}  // namespace ferry::models::launch
