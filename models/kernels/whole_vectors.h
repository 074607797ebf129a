// Functions of single elements, whose bits are the same wherever an element lies. LibTorch's
// functions on the host are not: the elements that remain at the end of a row, or of a thread's
// share, after the last whole vector go through another exp and differ in the last place. Here no
// elements remain: they are laid one after another, and zeros fill the last vector.
#pragma once

#include <ATen/core/Tensor.h>

namespace ferry::models {

// x of any shape. Differentiable.
at::Tensor silu(const at::Tensor& x);
at::Tensor sigmoid(const at::Tensor& x);
at::Tensor softplus(const at::Tensor& x);  // fp32

}  // namespace ferry::models
