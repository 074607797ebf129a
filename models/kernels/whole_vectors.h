// Functions of single elements, whose bits are the same wherever an element lies. LibTorch's
// functions on the host are not: the elements that remain at the end of a row, or of a thread's
// share, after the last whole vector go through another exp and differ in the last place. Here no
// elements remain: they are laid one after another, and zeros fill the last vector.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace ferry::models {

// x of any shape. Differentiable.
at::Tensor silu(const at::Tensor& x);
at::Tensor sigmoid(const at::Tensor& x);
at::Tensor gelu_tanh(const at::Tensor& x);  // approximated by tanh
at::Tensor tanh(const at::Tensor& x);
at::Tensor log(const at::Tensor& x);       // not differentiable
at::Tensor softplus(const at::Tensor& x);  // fp32

// c * tanh(x / c), or x where there is no c (Gemma 2). Differentiable.
at::Tensor soft_capped(const at::Tensor& x, const std::optional<double>& c);

}  // namespace ferry::models
