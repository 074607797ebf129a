// Adam's update of a piece of parameters, and the sum of squares that clipping needs, in one pass
// over memory each, on the host or on a GPU. Arithmetic is in fp32; what is stored in bf16 is
// rounded once, when it is stored, as Transformer Engine's kernels do it
// (common/multi_tensor/adam.cu, AdamFunctorMaster).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace ferry::trainer {

// All [elements], contiguous; elements is a multiple of 64.
struct AdamTensors {
  at::Tensor grad{};        // fp32, or of the parameters' dtype
  at::Tensor master{};      // fp32
  at::Tensor exp_avg{};     // fp32 or bf16
  at::Tensor exp_avg_sq{};  // fp32 or bf16
  at::Tensor param{};       // bf16 or fp16: the masters, rounded; undefined: masters are parameters
  at::Tensor decays{};      // [elements/64], uint8: whether these 64 decay
};

struct AdamScalars {
  double lr = 0;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  bool decoupled_weight_decay = true;  // AdamW's, else added to the gradient (L2)
  std::int64_t step = 1;               // from 1
  double grad_scale = 1;
};

void adam_update(const AdamTensors& tensors, const AdamScalars& scalars);

// [1], fp64, on the device of `x` [elements]: in the same order each time. Not finite exactly where
// some element is not: no square of a finite fp32 overflows fp64.
at::Tensor squared_sum(const at::Tensor& x);

}  // namespace ferry::trainer
