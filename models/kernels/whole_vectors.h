// Functions of single elements, whose bits are the same wherever an element lies. LibTorch's on the
// host are not: what is left at the end of a row, or of a thread's share, when whole vectors have
// been taken goes through another exp, and differs in the last place. Here nothing is left:
// elements are taken together, behind each other, and zeros behind the last ones.
#pragma once

#include <ATen/core/Tensor.h>

namespace ferry::models {

// Of any shape, differentiable.
at::Tensor silu(const at::Tensor& x);
at::Tensor sigmoid(const at::Tensor& x);

}  // namespace ferry::models
