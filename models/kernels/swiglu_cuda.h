// SwiGLU on a GPU, in one kernel with Hugging Face's two roundings: silu(gate), and its product
// with the up projection.
#pragma once

#include <ATen/core/Tensor.h>

namespace ferry::models {

// [rows, 2 * ffn], gate beside up -> [rows, ffn]. Not differentiable.
at::Tensor swiglu_cuda(const at::Tensor& gate_up);

// The gradient of gate_up.
at::Tensor swiglu_backward_cuda(const at::Tensor& grad_y, const at::Tensor& gate_up);

}  // namespace ferry::models
