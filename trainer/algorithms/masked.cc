#include "trainer/algorithms/masked.h"

#include <ATen/ATen.h>

#include "distckpt/base/error.h"

namespace ferry::trainer {

at::Tensor masked_sum(const at::Tensor& values, const at::Tensor& mask, Dim dim) {
  const auto valid = at::where(mask.to(at::kBool), values, 0.0) * mask;
  return dim ? valid.sum(*dim) : valid.sum();
}

at::Tensor masked_mean(const at::Tensor& values, const at::Tensor& mask, Dim dim) {
  const auto count = dim ? mask.sum(*dim) : mask.sum();
  return masked_sum(values, mask, dim) / (count + 1e-8);
}

at::Tensor masked_var(const at::Tensor& values, const at::Tensor& mask) {
  const auto count = mask.sum();
  const auto elements = count.item<double>();
  require(elements > 1, ErrorKind::kUsage, "whitening: a variance needs 2 tokens, there are {}",
          elements);
  const auto variance = masked_mean((values - masked_mean(values, mask)).pow(2), mask);
  return variance * (count / (count - 1));
}

at::Tensor masked_whiten(const at::Tensor& values, const at::Tensor& mask) {
  return (values - masked_mean(values, mask)) * at::rsqrt(masked_var(values, mask) + 1e-8);
}

}  // namespace ferry::trainer
