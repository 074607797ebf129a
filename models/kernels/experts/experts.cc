#include "models/kernels/experts/experts.h"

#include <ATen/ATen.h>

namespace ferry::models {

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
  if (results.is_cuda()) return combine_choices_cuda(results, inverse, weights, end);
  auto rows = inverse.defined() ? results.index_select(0, inverse) : results;
  if (end.defined()) rows = rows.masked_fill(inverse.ge(end).unsqueeze(1), 0);
  return (rows * weights.reshape({-1, 1}))
      .view({weights.size(0), weights.size(1), -1})
      .sum(1)
      .to(results.scalar_type());
}

}  // namespace ferry::models
