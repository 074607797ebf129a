#include "models/transformer/visual_rows.h"

#include <ATen/ops/index_copy.h>
#include <ATen/ops/index_select.h>

namespace ferry::models {

at::Tensor VisualRows::embed(const at::Tensor& embedded) const {
  return embedded.index_copy(0, rows, embeddings.to(embedded.scalar_type()));
}

at::Tensor VisualRows::add(std::int64_t layer, const at::Tensor& hidden) const {
  const auto& features = deepstack[static_cast<std::size_t>(layer)];
  return hidden.index_copy(0, rows, hidden.index_select(0, rows) + features);
}

}  // namespace ferry::models
