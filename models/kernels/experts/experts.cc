#include "models/kernels/experts/experts.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

namespace ferry::models {
namespace {

bool has_kernel(const at::Tensor& results) {
  return results.is_cuda() && results.scalar_type() != at::kHalf;
}

ChoiceGradients combine_choices_backward(const at::Tensor& grads,
                                         const at::Tensor& results,
                                         const ExpertOrder& places,
                                         const at::Tensor& weights) {
  if (has_kernel(results))
    return combine_choices_backward_cuda(grads, results, places.inverse, weights);
  const auto of_token = grads.unsqueeze(1).to(weights.scalar_type());
  const auto by_token = results.index_select(0, places.inverse)
                            .view({weights.size(0), weights.size(1), results.size(1)});
  return {.results = (of_token * weights.unsqueeze(2))
                         .to(results.scalar_type())
                         .view(results.sizes())
                         .index_select(0, places.order),
          .weights = (of_token * by_token).sum(2)};
}

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

at::Tensor combine_choices(const at::Tensor& results,
                           const at::Tensor& inverse,
                           const at::Tensor& weights,
                           const at::Tensor& end) {
  if (has_kernel(results)) return combine_choices_cuda(results, inverse, weights, end);
  auto rows = inverse.defined() ? results.index_select(0, inverse) : results;
  if (end.defined()) rows = rows.masked_fill(inverse.ge(end).unsqueeze(1), 0);
  return (rows * weights.reshape({-1, 1}))
      .view({weights.size(0), weights.size(1), results.size(1)})
      .sum(1)
      .to(results.scalar_type());
}

at::Tensor combine_choices_of(const ExpertOrder& places,
                              const at::Tensor& results,
                              const at::Tensor& weights) {
  return CombineChoices::apply(results, places.order, places.inverse, weights);
}

}  // namespace ferry::models
