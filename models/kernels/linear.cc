#include "models/kernels/linear.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>

#include "models/kernels/gemm.h"
#include "models/kernels/host_product.h"

namespace ferry::models {
namespace {

// Of fewer columns too.
constexpr std::int64_t kFewestColumns = 16;

// Forward by gemm_nt; the gradients as at::linear's.
class RowInvariantProduct : public torch::autograd::Function<RowInvariantProduct> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& x,
                            const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias) {
    context->save_for_backward({x, weight});
    context->saved_data["has_bias"] = bias.has_value();
    return gemm_nt(x, weight, bias.value_or(at::Tensor()));
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const auto& grad = grads[0];
    at::Tensor grad_x;
    at::Tensor grad_weight;
    at::Tensor grad_bias;
    if (context->needs_input_grad(0)) grad_x = at::matmul(grad, saved[1]);
    if (context->needs_input_grad(1)) grad_weight = at::matmul(grad.t(), saved[0]);
    if (context->saved_data["has_bias"].toBool() && context->needs_input_grad(2))
      grad_bias = grad.sum(0);
    return {grad_x, grad_weight, grad_bias};
  }
};

}  // namespace

at::Tensor linear(const at::Tensor& x,
                  const at::Tensor& weight,
                  const at::Tensor& bias,
                  Alignment alignment) {
  const auto optional_bias = bias.defined() ? std::optional(bias) : std::nullopt;
  if (alignment == Alignment::kBitwise && x.is_cuda())
    return RowInvariantProduct::apply(x, weight, optional_bias);
  const auto rows = x.size(0);
  if (!at::GradMode::is_enabled()) {
    if (auto y = host_product(x, weight, bias); y.defined()) return y;
  }
  if (alignment == Alignment::kFast || rows >= kHostProductRows || rows == 0)
    return at::linear(x, weight, optional_bias);
  const auto padded = at::constant_pad_nd(x, {0, 0, 0, kHostProductRows - rows});
  return at::linear(padded, weight, optional_bias).narrow(0, 0, rows);
}

at::Tensor linear_slice(const at::Tensor& x,
                        const at::Tensor& weight,
                        const at::Tensor& bias,
                        Alignment alignment) {
  const auto columns = weight.size(0);
  if (alignment == Alignment::kFast || x.is_cuda() || columns >= kFewestColumns)
    return linear(x, weight, bias, alignment);
  const auto missing = kFewestColumns - columns;
  return linear(x, at::constant_pad_nd(weight, {0, 0, 0, missing}),
                bias.defined() ? at::constant_pad_nd(bias, {0, missing}) : bias, alignment)
      .narrow(1, 0, columns)
      .contiguous();
}

at::Tensor linear_head(const at::Tensor& x,
                       const at::Tensor& weight,
                       const at::Tensor& bias,
                       Alignment alignment) {
  const auto product = x.scalar_type() == at::kFloat ? linear_slice : linear;
  return product(x, weight, bias, alignment);
}

}  // namespace ferry::models
