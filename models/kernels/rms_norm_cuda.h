// RMSNorm on a GPU, in one kernel with the bytes of Hugging Face's formula over 16 rows or more:
// x.float(), pow(2).mean(-1), x * rsqrt(variance + epsilon), rounded if
// NormRounding::kBeforeWeight, times the weight, or 1 + weight, rounded.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>

#include "models/spec/transformer_config.h"

namespace ferry::models {

// True if the kernel knows ATen's tree for rows of this many channels.
bool rms_norm_cuda_supports(std::int64_t channels);

struct RmsNormResult {
  at::Tensor sum{};  // x + delta, rounded; x where there is no delta
  at::Tensor y{};
  at::Tensor inverse_rms{};  // [rows], fp32
};

// The norm of x, or of x + delta where delta is defined; both [..., channels]. weight [channels].
// All tensors are bf16 or all fp32. `gathered`: see rms_norm(). Not differentiable.
RmsNormResult rms_norm_cuda(const at::Tensor& x,
                            const at::Tensor& delta,
                            const at::Tensor& weight,
                            double epsilon,
                            NormRounding rounding = NormRounding::kBeforeWeight,
                            bool gathered = false);

// The gradients of x, the sum that was normed, and of weight, with the same bits at every run.
// `grad_sum` is another gradient of x, added before rounding; undefined: none.
std::pair<at::Tensor, at::Tensor> rms_norm_backward_cuda(
    const at::Tensor& grad_y,
    const at::Tensor& x,
    const at::Tensor& weight,
    const at::Tensor& inverse_rms,
    const at::Tensor& grad_sum = {},
    NormRounding rounding = NormRounding::kBeforeWeight);

}  // namespace ferry::models
