#include "models/kernels/linear.h"

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/linear.h>

#include <optional>

namespace ferry::models {
namespace {

constexpr std::int64_t kFewestRows = 16;

}  // namespace

at::Tensor linear(const at::Tensor& x,
                  const at::Tensor& weight,
                  const at::Tensor& bias,
                  Alignment alignment) {
  const auto optional_bias = bias.defined() ? std::optional(bias) : std::nullopt;
  const auto rows = x.size(0);
  if (alignment == Alignment::kFast || rows >= kFewestRows || rows == 0)
    return at::linear(x, weight, optional_bias);
  const auto padded = at::constant_pad_nd(x, {0, 0, 0, kFewestRows - rows});
  return at::linear(padded, weight, optional_bias).narrow(0, 0, rows);
}

}  // namespace ferry::models
