// The one entry point of matrix products with a weight, for trainer and rollout alike.
//
// In kBitwise each row of the result is a function of that row and the weight alone: not of the
// number of rows, nor of how the weight's rows are sliced over ranks, nor of the threads. On the
// host oneDNN does so from 16 rows on, so fewer are padded, and fp32 has a product of its own
// (float_product.h); on a GPU kernels that split K are never taken.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "models/spec/alignment.h"

namespace ferry::models {

// The fewest rows of a product on the host in kBitwise: smaller products have other bits.
inline constexpr std::int64_t kHostProductRows = 16;

// x [rows, in], weight [out, in], bias [out] or undefined -> [rows, out]. Differentiable.
at::Tensor linear(const at::Tensor& x,
                  const at::Tensor& weight,
                  const at::Tensor& bias,
                  Alignment alignment);

// linear() of both in fp32, without a bias: of a router. bf16 or fp32, the same for both.
at::Tensor linear_in_fp32(const at::Tensor& x, const at::Tensor& weight, Alignment alignment);

// Multiplies by some rows of a wider weight, as tensor parallel ranks have them: in kBitwise a
// narrow slice gets the bits of the whole product.
at::Tensor linear_slice(const at::Tensor& x,
                        const at::Tensor& weight,
                        const at::Tensor& bias,
                        Alignment alignment);

// Multiplies by the weight of a classification head. In fp32 on the host transformers' bits depend
// on the number of rows where columns are few; kBitwise adds up as for many columns, and so has
// other bits.
at::Tensor linear_head(const at::Tensor& x,
                       const at::Tensor& weight,
                       const at::Tensor& bias,
                       Alignment alignment);

}  // namespace ferry::models
