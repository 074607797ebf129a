// Products of few rows with a weight in bf16 on the host, at the speed at which memory gives the
// weight, with the bits of at::linear: oneDNN's kernel packs the weight anew at each call, which
// for few rows takes longer than the product.
//
// An element is a chain of AVX-512's dot products of pairs (vdpbf16ps) along K, begun anew after
// each block of K, and the blocks' sums are added in order. The length of blocks is measured once
// for each shape, on products whose terms cancel, so that any other order shows. Where no length
// gives at::linear's bits, as on a machine with other instructions, there is no kernel.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace ferry::models {

// The number of rows from which at::linear takes about as long.
inline constexpr std::int64_t kMostHostProductRows = 32;

// x [rows, K], weight [N, K], bias [N] or undefined -> [rows, N]; returns an undefined tensor where
// there is no kernel for such operands. Not differentiable.
at::Tensor host_product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

}  // namespace ferry::models
