#include "models/transformer/visual_rows.h"

#include <ATen/ops/index_copy.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/nonzero.h>

namespace ferry::models {

at::Tensor VisualRows::embed(const at::Tensor& embedded) const {
  return embedded.index_copy(0, rows, embeddings.to(embedded.scalar_type()));
}

VisualRows VisualRows::select(const at::Tensor& places, const at::Tensor& chosen) const {
  if (places.size(0) == 0 && !embeddings.requires_grad()) return {};
  const auto of = [&](const at::Tensor& all) { return all.index_select(0, chosen); };
  VisualRows some{.rows = places, .embeddings = of(embeddings)};
  for (const auto& features : deepstack) some.deepstack.push_back(of(features));
  return some;
}

VisualRows VisualRows::part(std::int64_t begin, std::int64_t count) const {
  if (!any()) return {};
  const auto chosen = at::nonzero(rows.ge(begin).logical_and(rows.lt(begin + count))).squeeze(1);
  return select(rows.index_select(0, chosen) - begin, chosen);
}

at::Tensor VisualRows::add(std::int64_t layer, const at::Tensor& hidden) const {
  const auto& features = deepstack[static_cast<std::size_t>(layer)];
  return hidden.index_copy(0, rows, hidden.index_select(0, rows) + features);
}

}  // namespace ferry::models
