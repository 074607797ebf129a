// Sums, means and whitening of the elements that a mask has (verl utils/torch_functional.py).
// `values` [...] are floats, `mask` [...] is bool or int64, ones and zeros; `dim` is none, or the
// last. Values where the mask is 0 may be anything, infinite and NaN too.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace ferry::trainer {

using Dim = std::optional<std::int64_t>;

at::Tensor masked_sum(const at::Tensor& values, const at::Tensor& mask, Dim dim = {});

// sum / (count + 1e-8): 0 where there is nothing.
at::Tensor masked_mean(const at::Tensor& values, const at::Tensor& mask, Dim dim = {});

// It has Bessel's correction. Throws Error(kUsage) below two elements.
at::Tensor masked_var(const at::Tensor& values, const at::Tensor& mask);

// (values - mean) / sqrt(variance + 1e-8), of all elements, those that the mask lacks too.
at::Tensor masked_whiten(const at::Tensor& values, const at::Tensor& mask);

}  // namespace ferry::trainer
