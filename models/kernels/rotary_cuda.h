// Rotary position embeddings on a GPU, in one kernel with Hugging Face's three roundings:
// x * cos, rotate_half(x) * sin, and their sum.
#pragma once

#include <ATen/core/Tensor.h>

namespace ferry::models {

// x [tokens, heads, dim], cos and sin [tokens, 1, dim] of x's type -> like x, contiguous. With
// `interleaved` channels 2i and 2i + 1 turn together and come out as halves. Not differentiable.
at::Tensor rotary_cuda(const at::Tensor& x,
                       const at::Tensor& cos,
                       const at::Tensor& sin,
                       bool interleaved);

// The gradient of x.
at::Tensor rotary_backward_cuda(const at::Tensor& grad_y,
                                const at::Tensor& cos,
                                const at::Tensor& sin,
                                bool interleaved);

}  // namespace ferry::models
