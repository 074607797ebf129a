#include "models/kernels/split_qkv.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>

#include "models/kernels/rotary_cuda.h"

namespace ferry::models {
namespace {

struct Parts {
  at::Tensor queries, key, value;  // views: [tokens, groups, queries, dim], [tokens, groups, dim]
};

Parts parts_of(const at::Tensor& mixed) {
  const auto queries = mixed.size(2) - 2;
  return {mixed.narrow(2, 0, queries), mixed.select(2, queries), mixed.select(2, queries + 1)};
}

at::Tensor as_heads(const at::Tensor& queries) {
  return queries.reshape({queries.size(0), queries.size(1) * queries.size(2), queries.size(3)});
}

class FusedSplit : public torch::autograd::Function<FusedSplit> {
 public:
  // cos and sin: undefined where nothing turns.
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context,
                                                const at::Tensor& mixed,
                                                const at::Tensor& cos,
                                                const at::Tensor& sin) {
    context->save_for_backward({cos, sin});
    context->saved_data["shape"] = mixed.sizes().vec();
    const auto [queries, key, value] = parts_of(mixed);
    const auto own = [](const at::Tensor& x) { return x.clone(at::MemoryFormat::Contiguous); };
    if (!cos.defined()) return {as_heads(own(queries)), own(key), own(value)};
    return {rotary_cuda(queries, cos, sin, false), rotary_cuda(key, cos, sin, false), own(value)};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const auto grad = at::empty(context->saved_data["shape"].toIntVector(), grads[0].options());
    auto [queries, key, value] = parts_of(grad);
    if (saved[0].defined()) {
      rotary_backward_cuda(grads[0], saved[0], saved[1], false, queries);
      rotary_backward_cuda(grads[1], saved[0], saved[1], false, key);
    } else {
      queries.copy_(grads[0].reshape(queries.sizes()));
      key.copy_(grads[1]);
    }
    value.copy_(grads[2]);
    return {grad, at::Tensor(), at::Tensor()};
  }
};

}  // namespace

QueryKeyValue split_qkv(const at::Tensor& mixed, const RotaryAngles* angles) {
  if (mixed.is_cuda() && (angles == nullptr || angles->style == RotaryStyle::kHalves)) {
    const auto parts = angles == nullptr ? FusedSplit::apply(mixed, at::Tensor(), at::Tensor())
                                         : FusedSplit::apply(mixed, angles->cos, angles->sin);
    return {.query = parts[0], .key = parts[1], .value = parts[2]};
  }
  const auto [queries, key, value] = parts_of(mixed);
  const auto query = as_heads(queries);
  if (angles == nullptr)
    return {.query = query, .key = key.contiguous(), .value = value.contiguous()};
  return {.query = apply_rotary(query, *angles),
          .key = apply_rotary(key.contiguous(), *angles),
          .value = value.contiguous()};
}

}  // namespace ferry::models
