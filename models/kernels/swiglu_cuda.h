// SwiGLU on a GPU, in one kernel with Hugging Face's two roundings: silu(gate), and its product
// with the up projection.
#pragma once

#include <ATen/core/Tensor.h>

#include "models/kernels/swiglu.h"

namespace ferry::models {

// [rows, 2 * ffn], gate beside up -> [rows, ffn]. Not differentiable.
at::Tensor swiglu_cuda(const at::Tensor& gate_up);

// The gradient of gate_up.
at::Tensor swiglu_backward_cuda(const at::Tensor& grad_y, const at::Tensor& gate_up);

// rows [rows, columns] + their expert's bias; rows behind the last end get the last expert's. Not
// differentiable.
at::Tensor add_expert_biases_cuda(const at::Tensor& rows, const ExpertBiases& biases);
// The sum of each expert's rows, in an order that depends on nothing but their number: [experts,
// columns].
at::Tensor sum_expert_rows_cuda(const at::Tensor& rows, const at::Tensor& ends);

// quick_geglu() of that sum, with the bytes of its operations in ATen. Not differentiable.
at::Tensor quick_geglu_cuda(const at::Tensor& gate_up,
                            const ExpertBiases& biases,
                            const QuickGeglu& options);
// The gradient of gate_up.
at::Tensor quick_geglu_backward_cuda(const at::Tensor& grad_y,
                                     const at::Tensor& gate_up,
                                     const ExpertBiases& biases,
                                     const QuickGeglu& options);

}  // namespace ferry::models
