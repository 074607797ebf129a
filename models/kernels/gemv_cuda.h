// Products of a few rows with a weight on a GPU, as fast as the weight can be read. For generation
// in kFast: how a row is summed depends on nothing but K, but it is not the order of gemm.h.
#pragma once

#include <ATen/core/Tensor.h>

namespace ferry::models {

// Up to four rows, in bf16, of a multiple of 8 channels.
bool gemv_cuda_supports(const at::Tensor& x, const at::Tensor& weight);

// x [rows, K], weight [N, K], bias [N] or undefined -> [rows, N]. Not differentiable.
at::Tensor gemv_cuda(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

}  // namespace ferry::models
