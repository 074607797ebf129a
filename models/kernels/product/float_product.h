// Products in fp32 on the host for kBitwise: an element is one function of its row and its column,
// on any machine with AVX2 and FMA and with any number of threads. The bits equal those of MKL's
// kernel for wide products on AMD's processors. MKL, which at::matmul calls, chooses its kernel by
// the machine, the shape and the threads; this product does not.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "models/spec/alignment.h"

namespace ferry::models {

// The order in which the terms of an element are added up.
enum class FloatOrder : std::uint8_t {
  kChains,  // chains of fused multiply-adds, as MKL does it for 12 columns and more
  kLanes,   // four sums of products, as MKL does it for 3 to 11 columns
};

// True if products of x are computed here: fp32 on the host.
bool is_host_float(const at::Tensor& x);

// Terms of a chain in a product over `terms`: all up to 192, a half up to 383, then 192.
std::int64_t chain_length(std::int64_t terms);

// x [rows, k], weight [n, k], bias [n] or undefined -> [rows, n]. Differentiable: its gradients are
// computed in the same way. Throws Error(kDevice) without AVX2 and FMA.
at::Tensor float_linear(const at::Tensor& x,
                        const at::Tensor& weight,
                        const at::Tensor& bias,
                        FloatOrder order);

// a [count, heads, rows, k], b [count, heads, k, columns] -> [count, heads, rows, columns], in
// chains of `chain` terms, at most 192. Where k may grow, `chain` must stay constant for the bits
// to stay. Differentiable.
at::Tensor float_matmul(const at::Tensor& a, const at::Tensor& b, std::int64_t chain);

// a [.., rows, k], b [.., k, columns], with the same sizes in front, at most three of them ->
// [.., rows, columns]: at::matmul(), but in kBitwise in fp32 on the host in chains of
// chain_length(k). Differentiable.
at::Tensor matmul(const at::Tensor& a, const at::Tensor& b, Alignment alignment);

}  // namespace ferry::models
