// RMSNorm in the formula of Hugging Face (LlamaRMSNorm): the variance and the product with its root
// in fp32, rounded, and only then multiplied by the weight.
#pragma once

#include <ATen/core/Tensor.h>

namespace ferry::models {

// x [..., channels], weight [channels] -> like x. Differentiable.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double epsilon);

}  // namespace ferry::models
