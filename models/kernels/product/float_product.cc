#include "models/kernels/product/float_product.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <optional>

#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"
#include "models/kernels/product/float_chains.h"

namespace ferry::models {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr std::int64_t kFloatTileRows = 240;
constexpr std::int64_t kFloatTileColumns = 64;
constexpr std::int64_t kTermsOfAThread = 1 << 20;  // fewer take less time than to wake a thread

// a [count, heads, rows, k] times b [count, heads, k, columns], of any strides; `multiply` is given
// the matrices of each head and a tile of them.
template <typename Multiply>
at::Tensor multiply_all(const at::Tensor& a,
                        const at::Tensor& b,
                        const at::Tensor& bias,
                        std::int64_t chain,
                        const Multiply& multiply) {
  require(host::has_avx2_and_fma(), ErrorKind::kDevice,
          "this processor has no AVX2 and FMA, which products in fp32 are made of in bitwise mode");
  const auto count = a.size(0);
  const auto heads = a.size(1);
  const auto rows = a.size(2);
  const auto k = a.size(3);
  const auto columns = b.size(3);
  require(b.size(0) == count && b.size(1) == heads && b.size(2) == k && is_host_float(a) &&
              is_host_float(b),
          ErrorKind::kBug, "a product of {}x{} matrices of {}x{} and {}x{}", count, heads, rows, k,
          b.size(2), columns);
  if (k == 0) {
    const auto none = at::zeros({count, heads, rows, columns}, a.options());
    return bias.defined() ? none + bias : none;
  }
  auto c = at::empty({count, heads, rows, columns}, a.options());
  const auto own_bias = bias.defined() ? bias.contiguous() : bias;
  const auto* const a_data = a.const_data_ptr<float>();
  const auto* const b_data = b.const_data_ptr<float>();
  const auto* const bias_data = bias.defined() ? own_bias.const_data_ptr<float>() : nullptr;
  auto* const c_data = c.mutable_data_ptr<float>();
  const auto down = distckpt::ceil_div(rows, kFloatTileRows);
  const auto across = distckpt::ceil_div(columns, kFloatTileColumns);
  const auto terms = std::min(rows, kFloatTileRows) * std::min(columns, kFloatTileColumns) * k;
  const auto together = std::max<std::int64_t>(1, kTermsOfAThread / std::max(terms, k));
  const auto run = [&](std::int64_t task) {
    const auto row = task / across % down * kFloatTileRows;
    const auto column = task % across * kFloatTileColumns;
    const auto matrix = task / across / down;
    const auto i = matrix / heads;
    const auto j = matrix % heads;
    multiply(host::FloatMatrices{.a = a_data + i * a.stride(0) + j * a.stride(1),
                                 .a_row = a.stride(2),
                                 .a_k = a.stride(3),
                                 .b = b_data + i * b.stride(0) + j * b.stride(1),
                                 .b_k = b.stride(2),
                                 .b_column = b.stride(3),
                                 .bias = bias_data,
                                 .c = c_data + matrix * rows * columns,
                                 .c_row = columns,
                                 .rows = rows,
                                 .columns = columns,
                                 .k = k,
                                 .chain = chain},
             host::FloatTile{.row = row,
                             .rows = std::min(kFloatTileRows, rows - row),
                             .column = column,
                             .columns = std::min(kFloatTileColumns, columns - column)});
  };
  at::parallel_for(0, count * heads * down * across, together,
                   [&](std::int64_t begin, std::int64_t end) {
                     for (auto task = begin; task < end; ++task) run(task);
                   });
  return c;
}

at::Tensor in_chains(const at::Tensor& a, const at::Tensor& b) {
  return multiply_all(a, b, {}, chain_length(a.size(3)), host::multiply_chains);
}

// a [1, 1, rows, k], b [1, 1, k, columns]; a bias, or none, and gradients of all three.
class FloatProduct : public torch::autograd::Function<FloatProduct> {
 public:
  static at::Tensor forward(AutogradContext* context,
                            const at::Tensor& a,
                            const at::Tensor& b,
                            const std::optional<at::Tensor>& bias,
                            std::int64_t chain,
                            bool in_lanes) {
    context->save_for_backward({a, b});
    context->saved_data["has_bias"] = bias.has_value();
    const auto multiply = in_lanes ? host::multiply_lanes : host::multiply_chains;
    return multiply_all(a, b, bias.value_or(at::Tensor()), chain, multiply);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const auto& a = saved[0];
    const auto& b = saved[1];
    const auto& grad = grads[0];
    variable_list of(5);
    if (context->needs_input_grad(0)) of[0] = in_chains(grad, b.transpose(2, 3));
    if (context->needs_input_grad(1)) {
      // The gradient gets the memory layout of b.
      of[1] = b.stride(2) == 1 ? in_chains(grad.transpose(2, 3), a).transpose(2, 3)
                               : in_chains(a.transpose(2, 3), grad);
    }
    // needs_input_grad() may only be asked about inputs that are defined.
    if (context->saved_data["has_bias"].toBool() && context->needs_input_grad(2))
      of[2] = in_chains(at::ones({1, 1, 1, grad.size(2)}, grad.options()), grad).flatten();
    return of;
  }
};

}  // namespace

bool is_host_float(const at::Tensor& x) {
  return x.is_cpu() && x.scalar_type() == at::kFloat;
}

std::int64_t chain_length(std::int64_t terms) {
  const bool in_halves = terms > host::kLongestChain && terms < 2 * host::kLongestChain;
  return in_halves ? terms / 2 : std::clamp<std::int64_t>(terms, 1, host::kLongestChain);
}

at::Tensor float_linear(const at::Tensor& x,
                        const at::Tensor& weight,
                        const at::Tensor& bias,
                        FloatOrder order) {
  const bool in_lanes = order == FloatOrder::kLanes;
  const auto two_more = [&](const at::Tensor& matrix) {
    return (in_lanes ? matrix.contiguous() : matrix).unsqueeze(0).unsqueeze(0);
  };
  return FloatProduct::apply(two_more(x), two_more(weight).transpose(2, 3),
                             bias.defined() ? std::optional(bias) : std::nullopt,
                             chain_length(x.size(1)), in_lanes)
      .squeeze(0)
      .squeeze(0);
}

at::Tensor float_matmul(const at::Tensor& a, const at::Tensor& b, std::int64_t chain) {
  return FloatProduct::apply(a, b, std::optional<at::Tensor>(), chain, false);
}

at::Tensor matmul(const at::Tensor& a, const at::Tensor& b, Alignment alignment) {
  if (alignment == Alignment::kFast || !is_host_float(a)) return at::matmul(a, b);
  const auto of_four = [](const at::Tensor& x) {
    auto y = x.dim() == 5 ? x.flatten(0, 1) : x;
    while (y.dim() < 4) y = y.unsqueeze(0);
    return y;
  };
  auto sizes = a.sizes().vec();
  sizes.back() = b.size(-1);
  return float_matmul(of_four(a), of_four(b), chain_length(a.size(-1))).view(sizes);
}

}  // namespace ferry::models
