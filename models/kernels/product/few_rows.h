// The product of few rows on a GPU: a warp reads a row of the weight once for all of them.
#pragma once

#include <ATen/core/Tensor.h>

namespace ferry::models {

// True if few_rows_product() takes x [rows, K] and weight [N, K], and is the faster product: bf16
// on a GPU, 1 to 4 rows.
bool few_rows_product_supported(const at::Tensor& x, const at::Tensor& weight);

// x [rows, K], weight [N, K], bias [N] or undefined -> [rows, N], summed in fp32 and rounded once.
// Not differentiable.
at::Tensor few_rows_product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);
// The same without a bias, not rounded: fp32.
at::Tensor few_rows_product_in_fp32(const at::Tensor& x, const at::Tensor& weight);

}  // namespace ferry::models
