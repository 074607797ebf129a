// The gated activations of feed-forward layers for single elements, a rounding for each of ATen's
// operations.
#pragma once

#include "models/kernels/cuda/cuda_element.cuh"

namespace ferry::models::launch {

__device__ inline float silu(float x) {  // as ATen's silu_kernel
  return __fdiv_rn(x, __fadd_rn(1.0F, ::expf(-x)));
}

template <typename T>
__device__ float swiglu_of(float gate, float up) {
  return __fmul_rn(rounded<T>(silu(gate)), up);
}

constexpr float kQuickAlpha = 1.702F;

// quick_geglu() of sums with biases, before its last rounding.
template <typename T>
__device__ float quick_geglu_of(float gate, float up, float clamp, float offset) {
  gate = fminf(gate, clamp);
  up = fmaxf(fminf(up, clamp), -clamp);
  const float scaled = rounded<T>(__fmul_rn(gate, kQuickAlpha));
  const float sigmoid = rounded<T>(__fdiv_rn(1.0F, __fadd_rn(1.0F, ::expf(-scaled))));
  const float gated = rounded<T>(__fmul_rn(gate, sigmoid));
  return __fmul_rn(rounded<T>(__fadd_rn(up, offset)), gated);
}

}  // namespace ferry::models::launch
