// The last steps of kernels of experts: biases, activations and sums over choices.
#pragma once

#include <type_traits>

#include "models/kernels/cuda/gated_units.cuh"
#include "models/kernels/cuda/weight_lines.cuh"
#include "models/kernels/experts/expert_launch.h"

namespace ferry::models::launch {

// A column of combine_choices() of one token: result(i), of choice i, is rounded. W: of the
// choices' weights, bf16 or fp32.
template <typename W, typename Result>
__device__ Bf16 weighed_sum(const W* of_choices, int topk, const Result& result) {
  constexpr int kChains = 4;
  float chains[kChains] = {};
  for (int i = 0; i < topk; i += kChains) {
#pragma unroll
    for (int chain = 0; chain < kChains; ++chain) {
      if (i + chain >= topk) break;
      const float product = __fmul_rn(result(i + chain), widen(of_choices[i + chain]));
      // A product of bf16 by bf16 is rounded to bf16, one by fp32 is not.
      chains[chain] =
          __fadd_rn(chains[chain], std::is_same_v<W, Bf16> ? rounded<Bf16>(product) : product);
    }
  }
  return narrow<Bf16>(__fadd_rn(__fadd_rn(__fadd_rn(chains[0], chains[1]), chains[2]), chains[3]));
}

// A product and the bias behind it, both rounded; `bias` may be null.
__device__ inline float plus_bias(float sum, const Bf16* bias) {
  const float product = rounded<Bf16>(sum);
  return bias == nullptr ? product : rounded<Bf16>(__fadd_rn(product, widen(*bias)));
}

// The halves of a gated product joined, before the last rounding.
__device__ inline float gated(float gate, float up, const GatedActivation& activation) {
  return activation.quick ? quick_geglu_of<Bf16>(gate, up, activation.clamp, activation.offset)
                          : swiglu_of<Bf16>(gate, up);
}

}  // namespace ferry::models::launch
