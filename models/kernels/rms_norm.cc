#include "models/kernels/rms_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/rsqrt.h>

namespace ferry::models {

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double epsilon) {
  const auto wide = x.to(at::kFloat);
  const auto variance = wide.pow(2).mean(-1, /*keepdim=*/true);
  return weight * (wide * at::rsqrt(variance + epsilon)).to(x.scalar_type());
}

}  // namespace ferry::models
