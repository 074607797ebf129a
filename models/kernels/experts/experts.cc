#include "models/kernels/experts/experts.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

namespace ferry::models {
namespace {

bool has_kernel(const at::Tensor& results) {
  return results.is_cuda() && results.scalar_type() != at::kHalf;
}

// Zeros for rows that are missing.
at::Tensor with_all_rows(const at::Tensor& results, const at::Tensor& inverse) {
  const auto missing = inverse.size(0) - results.size(0);
  return missing == 0 ? results : at::constant_pad_nd(results, {0, 0, 0, missing});
}

class RowsOfChoices : public torch::autograd::Function<RowsOfChoices> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& x,
                            const at::Tensor& order,
                            const at::Tensor& inverse,
                            std::int64_t topk) {
    context->save_for_backward({inverse});
    context->saved_data["topk"] = topk;
    return gather_choices(x, {.order = order}, topk, order.size(0));
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const auto topk = context->saved_data["topk"].toInt();
    const auto ones = at::ones({grads[0].size(0) / topk, topk}, grads[0].options());
    return {combine_choices(grads[0], context->get_saved_variables()[0], ones), at::Tensor(),
            at::Tensor(), at::Tensor()};
  }
};

// Neither the weighed results nor any copy in another order is kept, or made on a GPU.
class CombineChoices : public torch::autograd::Function<CombineChoices> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& results,
                            const at::Tensor& order,
                            const at::Tensor& inverse,
                            const at::Tensor& weights) {
    context->save_for_backward({results, order, inverse, weights});
    return combine_choices(results, inverse, weights);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const ExpertOrder places{.order = saved[1], .inverse = saved[2]};
    auto gradients = combine_choices_backward(grads[0], saved[0], places, saved[3]);
    return {std::move(gradients.results), at::Tensor(), at::Tensor(), std::move(gradients.weights)};
  }
};

}  // namespace

ExpertOrder expert_order(const at::Tensor& choices, OwnExperts range) {
  if (choices.is_cuda()) return expert_order_cuda(choices, range);
  const auto inside = choices.ge(range.first).logical_and_(choices.lt(range.first + range.count));
  const auto local = at::where(inside, choices - range.first, range.count);
  const auto order = at::argsort(local, /*stable=*/true, 0, /*descending=*/false);
  auto inverse = at::empty_like(order);
  inverse.index_put_({order}, at::arange(order.size(0), order.options()));
  const auto counts = at::bincount(local, {}, range.count + 1).narrow(0, 0, range.count);
  return {.order = order, .inverse = inverse, .ends = counts.cumsum(0).to(at::kInt)};
}

at::Tensor gather_choices(const at::Tensor& x,
                          const ExpertOrder& places,
                          std::int64_t topk,
                          std::int64_t count) {
  if (x.is_cuda()) return gather_choices_cuda(x, places.order, topk, count);
  return x.index_select(0, at::div(places.order.narrow(0, 0, count), topk, "trunc"));
}

at::Tensor rows_of_choices(const at::Tensor& x, const ExpertOrder& places, std::int64_t topk) {
  return RowsOfChoices::apply(x, places.order, places.inverse, topk);
}

at::Tensor first_of_ranks(const at::Tensor& experts, std::int64_t local) {
  if (experts.is_cuda()) return first_of_ranks_cuda(experts, local);
  const auto ranks = at::div(experts, local, "trunc");
  const auto is_repeated = ranks.unsqueeze(2).eq(ranks.unsqueeze(1)).tril(-1).any(2);
  return ranks.masked_fill(is_repeated, -1).flatten();
}

at::Tensor choices_of_rows(const at::Tensor& experts, const at::Tensor& rows, std::int64_t local) {
  if (experts.is_cuda()) return choices_of_rows_cuda(experts, rows, local);
  const auto of_tokens = experts.index_select(0, at::div(rows, experts.size(1), "trunc"));
  const auto ranks = at::div(experts.flatten().index_select(0, rows), local, "trunc").unsqueeze(1);
  return at::where(at::div(of_tokens, local, "trunc").eq(ranks), of_tokens - ranks * local, -1)
      .to(at::kInt);
}

at::Tensor combine_choices(const at::Tensor& results,
                           const at::Tensor& inverse,
                           const at::Tensor& weights,
                           const at::Tensor& end) {
  if (has_kernel(results)) return combine_choices_cuda(results, inverse, weights, end);
  auto rows =
      inverse.defined() ? with_all_rows(results, inverse).index_select(0, inverse) : results;
  if (end.defined()) rows = rows.masked_fill(inverse.ge(end).unsqueeze(1), 0);
  return (rows * weights.reshape({-1, 1}))
      .view({weights.size(0), weights.size(1), results.size(1)})
      .sum(1)
      .to(results.scalar_type());
}

ChoiceGradients combine_choices_backward(const at::Tensor& grads,
                                         const at::Tensor& results,
                                         const ExpertOrder& places,
                                         const at::Tensor& weights,
                                         const at::Tensor& end) {
  if (has_kernel(results))
    return combine_choices_backward_cuda(grads, results, places.inverse, weights, end);
  const auto of_token = grads.unsqueeze(1).to(weights.scalar_type());
  const auto by_token = with_all_rows(results, places.inverse)
                            .index_select(0, places.inverse)
                            .view({weights.size(0), weights.size(1), results.size(1)});
  auto of_weights = (of_token * by_token).sum(2);
  if (end.defined())
    of_weights = of_weights.masked_fill(places.inverse.view(weights.sizes()).ge(end), 0);
  return {.results = (of_token * weights.unsqueeze(2))
                         .to(results.scalar_type())
                         .view({-1, results.size(1)})
                         .index_select(0, places.order.narrow(0, 0, results.size(0))),
          .weights = of_weights};
}

at::Tensor combine_choices_of(const ExpertOrder& places,
                              const at::Tensor& results,
                              const at::Tensor& weights) {
  return CombineChoices::apply(results, places.order, places.inverse, weights);
}

}  // namespace ferry::models
