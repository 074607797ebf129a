// The one entry point of matrix products with a weight, for trainer and rollout alike.
//
// In kBitwise each row of the result is a function of that row and the weight alone: not of the
// number of rows, nor of how the weight's rows are sliced over ranks, nor of the threads. On the
// host oneDNN holds that from 16 rows on, so fewer are padded, and fp32 has a product of its own
// (float_product.h); on a GPU kernels that split K are never taken.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "models/spec/alignment.h"

namespace ferry::models {

// Smaller products of the host have bits of their own.
inline constexpr std::int64_t kHostProductRows = 16;

// x [rows, in], weight [out, in], bias [out] or undefined -> [rows, out]. Differentiable.
at::Tensor linear(const at::Tensor& x,
                  const at::Tensor& weight,
                  const at::Tensor& bias,
                  Alignment alignment);

// The same of some rows of a wider weight, as tensor parallel ranks have them: in kBitwise narrow
// slices are computed as the whole is.
at::Tensor linear_slice(const at::Tensor& x,
                        const at::Tensor& weight,
                        const at::Tensor& bias,
                        Alignment alignment);

// The same of a classification head. In fp32, where the kernels of transformers' host for a few
// columns look at the number of rows, kBitwise adds up as for many, and so has other bits.
at::Tensor linear_head(const at::Tensor& x,
                       const at::Tensor& weight,
                       const at::Tensor& bias,
                       Alignment alignment);

}  // namespace ferry::models
