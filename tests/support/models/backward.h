// The backward pass of models without a trainer, whose schedules and optimizer have it otherwise.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>

#include <memory>
#include <vector>

#include "models/finalize_model_grads.h"
#include "models/gpt_model.h"
#include "models/pipeline_forward.h"

namespace ferry::models {

// Propagates `gradient`, that of pipeline_forward()'s result, through all stages.
inline void pipeline_backward(const std::vector<std::unique_ptr<GPTModel>>& chunks,
                              const std::vector<at::Tensor>& received,
                              const std::vector<at::Tensor>& sent,
                              const at::Tensor& gradient) {
  const auto& mesh = chunks.front()->mesh();
  at::Tensor handed;
  for (std::size_t i = chunks.size(); i-- > 0;) {
    const auto [before, behind] = neighbours(mesh, i, chunks.size());
    auto of_output = gradient;
    if (behind == mesh.coordinates().pp) {
      of_output = handed;
    } else if (behind >= 0) {
      of_output = at::empty_like(sent[i]);
      mesh.pp().receive(of_output, behind);
    }
    sent[i].backward(of_output);
    if (before == mesh.coordinates().pp) {
      handed = received[i].grad();
    } else if (before >= 0) {
      mesh.pp().send(received[i].grad(), before);
    }
  }
}

// Called by all ranks of the mesh, once for all chunks of a stage: `chunks` are this rank's, first
// to last. Gradients are summed in the order of the ranks, not averaged. Parameters without a
// gradient on this rank get zeros.
inline void finalize_model_grads(const std::vector<GPTModel*>& chunks) {
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
