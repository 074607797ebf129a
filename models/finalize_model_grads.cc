#include "models/finalize_model_grads.h"

#include <ATen/ops/zeros_like.h>

#include "models/distributed/world.h"

namespace ferry::models {

// The first stage adds up the gradients, and sends the sum back.
void sum_over_stages(const ProcessGroup& pp, at::Tensor& gradient, const std::vector<int>& stages) {
  if (pp.rank() != stages.front()) {
    pp.send(gradient, stages.front());
    pp.receive(gradient, stages.front());
    return;
  }
  auto sum = gradient.to(at::kFloat);
  auto other = at::zeros_like(gradient);
  for (std::size_t i = 1; i < stages.size(); ++i) {
    pp.receive(other, stages[i]);
    sum.add_(other);
  }
  gradient.copy_(sum);
  for (std::size_t i = 1; i < stages.size(); ++i) pp.send(gradient, stages[i]);
}

void finalize_model_grads(const std::vector<GPTModel*>& chunks) {
  for (auto* const model : chunks) {
    const auto& mesh = model->mesh();
    for (const auto& leaf : model->parameters().leaves()) {
      if (!leaf.value.requires_grad()) continue;
      const auto& spec = model->parameters().all()[leaf.parameters[0]].spec;
      auto& gradient = leaf.value.mutable_grad();
      if (!gradient.defined()) gradient = at::zeros_like(leaf.value);
      if (leaf.gradient == GradientOverTp::kPartial && spec.sharing == Sharing::kReplicated)
        gradient = mesh.tp().all_reduce(gradient);
      gradient = (spec.expert ? mesh.edp() : mesh.dp_cp()).all_reduce(gradient);
    }
  }
  const auto& stages = chunks.front()->embedding_stages();
  if (stages.size() < 2) return;
  for (auto* const model : chunks) {
    for (const auto& leaf : model->parameters().leaves()) {
      if (model->parameters().all()[leaf.parameters[0]].spec.key == kWordEmbeddings)
        sum_over_stages(model->mesh().pp(), leaf.value.mutable_grad(), stages);
    }
  }
}

}  // namespace ferry::models
