// The router: which experts a token goes to, and with what weight. In the order of operations, the
// dtypes and the ties of each family's router in transformers 5.17.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "models/transformer/layer_context.h"

namespace ferry::models {

struct Routing {
  at::Tensor experts{};  // [tokens, topk], int64
  at::Tensor weights{};  // [tokens, topk], of the model's dtype or fp32, as the family has it
  at::Tensor logits{};   // [tokens, experts]
};

class TopKRouter {
 public:
  // Takes mlp.router.* below `prefix`.
  TopKRouter(const ModelSetup& setup, Parameters& parameters, const std::string& prefix);

  // x [tokens, hidden]; `given` [tokens, topk], as RouterChoice has it.
  Routing forward(const at::Tensor& x, const at::Tensor& given = {}) const;

 private:
  // Scores of experts in groups that are not among the best become `hidden`.
  at::Tensor limit_to_groups(const at::Tensor& scores,
                             const at::Tensor& group_scores,
                             double hidden) const;

  const ModelSetup& setup_;
  at::Tensor weight_, expert_bias_;
};

}  // namespace ferry::models
