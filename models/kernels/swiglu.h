// SwiGLU with Hugging Face's two roundings: silu(gate), then its product with the up projection.
#pragma once

#include <ATen/core/Tensor.h>

namespace ferry::models {

// [rows, 2 * ffn], gate beside up -> [rows, ffn]. Differentiable.
at::Tensor swiglu(const at::Tensor& gate_up);

}  // namespace ferry::models
