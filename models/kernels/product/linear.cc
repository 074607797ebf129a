#include "models/kernels/product/linear.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>

#include "models/kernels/product/few_rows.h"
#include "models/kernels/product/float_product.h"
#include "models/kernels/product/gemm.h"
#include "models/kernels/product/host_product.h"
#include "models/kernels/product/main_grad.h"

namespace ferry::models {
namespace {

// Products of fewer columns have bits of their own, too.
constexpr std::int64_t kFewestColumns = 16;
// MKL in fp32, and so transformers' router, adds up in lanes where columns are few.
constexpr std::int64_t kFewestInLanes = 3;
constexpr std::int64_t kMostInLanes = 11;

// True if products on a GPU can add the weight's gradient to its main_grad() in fp32.
bool adds_to_main_grad(const at::Tensor& weight) {
  if (!weight.is_cuda() || weight.scalar_type() == at::kFloat) return false;
  const auto* const hook = main_grad_hook(weight);
  return hook != nullptr && hook->main_grad().scalar_type() == at::kFloat;
}

// The gradient of the weight; undefined if it was added to main_grad().
at::Tensor gradient_of_weight(const at::Tensor& grad,
                              const at::Tensor& x,
                              const at::Tensor& weight) {
  if (!adds_to_main_grad(weight)) return at::matmul(grad.t(), x);
  auto sum = main_grad_hook(weight)->main_grad();
  at::addmm_out(sum, sum, grad.t(), x, at::kFloat);
  return {};
}

// Forward by gemm_nt in kBitwise; the gradients as at::linear's.
class LinearProduct : public torch::autograd::Function<LinearProduct> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& x,
                            const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias,
                            bool bitwise) {
    context->save_for_backward({x, weight});
    context->saved_data["has_bias"] = bias.has_value();
    return bitwise ? gemm_nt(x, weight, bias.value_or(at::Tensor())) : at::linear(x, weight, bias);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const auto& grad = grads[0];
    at::Tensor grad_x;
    at::Tensor grad_weight;
    at::Tensor grad_bias;
    if (context->needs_input_grad(0)) grad_x = at::matmul(grad, saved[1]);
    if (context->needs_input_grad(1)) grad_weight = gradient_of_weight(grad, saved[0], saved[1]);
    if (context->saved_data["has_bias"].toBool() && context->needs_input_grad(2))
      grad_bias = grad.sum(0);
    return {grad_x, grad_weight, grad_bias, at::Tensor()};
  }
};

}  // namespace

at::Tensor linear(const at::Tensor& x,
                  const at::Tensor& weight,
                  const at::Tensor& bias,
                  Alignment alignment) {
  const auto optional_bias = bias.defined() ? std::optional(bias) : std::nullopt;
  const bool bitwise_on_gpu = alignment == Alignment::kBitwise && x.is_cuda();
  if (bitwise_on_gpu || (at::GradMode::is_enabled() && adds_to_main_grad(weight)))
    return LinearProduct::apply(x, weight, optional_bias, bitwise_on_gpu);
  if (alignment == Alignment::kBitwise && is_host_float(x)) {
    const auto columns = weight.size(0);
    const bool few = columns >= kFewestInLanes && columns <= kMostInLanes;
    return float_linear(x, weight, bias, few ? FloatOrder::kLanes : FloatOrder::kChains);
  }
  const auto rows = x.size(0);
  if (!at::GradMode::is_enabled()) {
    if (auto y = host_product(x, weight, bias); y.defined()) return y;
    if (alignment == Alignment::kFast && few_rows_product_supported(x, weight))
      return few_rows_product(x, weight, bias);
  }
  if (alignment == Alignment::kFast || rows >= kHostProductRows || rows == 0)
    return at::linear(x, weight, optional_bias);
  const auto padded = at::constant_pad_nd(x, {0, 0, 0, kHostProductRows - rows});
  return at::linear(padded, weight, optional_bias).narrow(0, 0, rows);
}

at::Tensor linear_in_fp32(const at::Tensor& x, const at::Tensor& weight, Alignment alignment) {
  if (x.is_cuda() && x.scalar_type() == at::kBFloat16 && weight.scalar_type() == at::kBFloat16 &&
      !at::GradMode::is_enabled()) {
    if (alignment == Alignment::kBitwise) return gemm_nt_in_fp32(x, weight);
    if (few_rows_product_supported(x, weight)) return few_rows_product_in_fp32(x, weight);
  }
  return linear(x.to(at::kFloat), weight.to(at::kFloat), {}, alignment);
}

at::Tensor linear_slice(const at::Tensor& x,
                        const at::Tensor& weight,
                        const at::Tensor& bias,
                        Alignment alignment) {
  const auto columns = weight.size(0);
  if (alignment == Alignment::kBitwise && is_host_float(x))
    return float_linear(x, weight, bias, FloatOrder::kChains);
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
