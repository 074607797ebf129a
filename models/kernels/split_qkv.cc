#include "models/kernels/split_qkv.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>

#include "models/kernels/rms_norm.h"

namespace ferry::models {
namespace {

struct Parts {
  at::Tensor queries, key, value;  // views: [tokens, groups, queries, dim], [tokens, groups, dim]
};

Parts parts_of(const at::Tensor& mixed, QueriesOfGroup queries) {
  const auto all = mixed.size(2) - 2;
  return {mixed.narrow(2, queries.first, queries.count), mixed.select(2, all),
          mixed.select(2, all + 1)};
}

bool is_all(QueriesOfGroup queries, const at::Tensor& mixed) {
  return queries.count == mixed.size(2) - 2;
}
at::Tensor queries_and_key(const at::Tensor& mixed) {
  return mixed.narrow(2, 0, mixed.size(2) - 1);
}

at::Tensor as_heads(const at::Tensor& queries) {
  return queries.reshape({queries.size(0), queries.size(1) * queries.size(2), queries.size(3)});
}

class FusedSplit : public torch::autograd::Function<FusedSplit> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context,
                                                const at::Tensor& mixed,
                                                QueriesOfGroup wanted,
                                                const std::optional<at::Tensor>& cos,
                                                const std::optional<at::Tensor>& sin) {
    context->save_for_backward({cos.value_or(at::Tensor()), sin.value_or(at::Tensor())});
    context->saved_data["shape"] = mixed.sizes().vec();
    context->saved_data["first"] = wanted.first;
    context->saved_data["count"] = wanted.count;
    const auto [queries, key, value] = parts_of(mixed, wanted);
    const auto own = [](const at::Tensor& x) { return x.clone(at::MemoryFormat::Contiguous); };
    if (!cos) return {as_heads(own(queries)), own(key), own(value)};
    if (is_all(wanted, mixed)) {
      const auto apart = rotary_split_cuda(queries_and_key(mixed), *cos, *sin);
      return {apart.query, apart.key, own(value)};
    }
    return {rotary_cuda(queries, *cos, *sin, false), rotary_cuda(key, *cos, *sin, false),
            own(value)};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const QueriesOfGroup wanted{.first = context->saved_data["first"].toInt(),
                                .count = context->saved_data["count"].toInt()};
    auto grad = at::empty(context->saved_data["shape"].toIntVector(), grads[0].options());
    if (wanted.count < grad.size(2) - 2) grad.zero_();
    auto [queries, key, value] = parts_of(grad, wanted);
    if (saved[0].defined() && is_all(wanted, grad)) {
      auto both = queries_and_key(grad);
      rotary_split_backward_cuda({.query = grads[0], .key = grads[1]}, saved[0], saved[1], both);
    } else if (saved[0].defined()) {
      rotary_backward_cuda(grads[0], saved[0], saved[1], false, queries);
      rotary_backward_cuda(grads[1], saved[0], saved[1], false, key);
    } else {
      queries.copy_(grads[0].reshape(queries.sizes()));
      key.copy_(grads[1]);
    }
    value.copy_(grads[2]);
    return {grad, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

// True if queries and keys turn as the kernels do it: by halves, in the dtype of `mixed`.
bool turns_by_halves(const at::Tensor& mixed, const RotaryAngles* angles) {
  return angles != nullptr && angles->style == RotaryStyle::kHalves &&
         angles->are_of(mixed.scalar_type());
}

}  // namespace

QueryKeyValue split_qkv(const at::Tensor& mixed,
                        QueriesOfGroup queries,
                        const RotaryAngles* angles) {
  const bool turns = turns_by_halves(mixed, angles);
  if (mixed.is_cuda() && turns && !at::GradMode::is_enabled() && is_all(queries, mixed)) {
    const auto apart = rotary_split_cuda(queries_and_key(mixed), angles->cos, angles->sin);
    return {.query = apart.query, .key = apart.key, .value = parts_of(mixed, queries).value};
  }
  if (mixed.is_cuda() && (angles == nullptr || turns)) {
    const auto cos = angles == nullptr ? std::nullopt : std::optional(angles->cos);
    const auto sin = angles == nullptr ? std::nullopt : std::optional(angles->sin);
    const auto parts = FusedSplit::apply(mixed, queries, cos, sin);
    return {.query = parts[0], .key = parts[1], .value = parts[2]};
  }
  const auto [some, key, value] = parts_of(mixed, queries);
  const auto query = as_heads(some);
  if (angles == nullptr)
    return {.query = query, .key = key.contiguous(), .value = value.contiguous()};
  return {.query = apply_rotary(query, *angles),
          .key = apply_rotary(key.contiguous(), *angles),
          .value = value.contiguous()};
}

QueryKeyValue split_and_norm_qkv(const at::Tensor& mixed,
                                 QueriesOfGroup queries,
                                 const HeadNorms& norms,
                                 NormRounding rounding,
                                 const RotaryAngles* angles) {
  if (!at::GradMode::is_enabled() && is_all(queries, mixed) &&
      rounding == NormRounding::kBeforeWeight && turns_by_halves(mixed, angles) &&
      norm_rotary_cuda_supports(mixed, angles->cos)) {
    const auto apart = norm_rotary_cuda(queries_and_key(mixed), norms, angles->cos, angles->sin);
    return {.query = apart.query, .key = apart.key, .value = parts_of(mixed, queries).value};
  }
  const auto apart = split_qkv(mixed, queries, nullptr);
  const auto turned = [&](const at::Tensor& heads, const at::Tensor& weight) {
    const auto normed = rms_norm(heads, weight, norms.epsilon, rounding);
    return angles == nullptr ? normed : apply_rotary(normed, *angles);
  };
  return {.query = turned(apart.query, norms.query),
          .key = turned(apart.key, norms.key),
          .value = apart.value};
}

}  // namespace ferry::models
