// The router: chooses the experts of each token, and their weights. Order of operations, dtypes and
// ties are those of each family's router in transformers 5.17.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "models/transformer/layer_context.h"

namespace ferry::models {

struct Routing {
  at::Tensor experts{};  // [tokens, topk], int64
  at::Tensor weights{};  // [tokens, topk], of the model's dtype or fp32, as the family has it
  at::Tensor logits{};   // [tokens, experts]; undefined where a kernel keeps them
};

class TopKRouter {
 public:
  // Takes mlp.router.* below `prefix`.
  TopKRouter(const ModelSetup& setup, Parameters& parameters, const std::string& prefix);

  // x [tokens, hidden] -> its routing, which `choice` has seen.
  Routing forward(const at::Tensor& x, const RouterChoice& choice) const;
  // The same in generation, where one kernel of a GPU may choose: in kFast otherwise where experts
  // tie.
  Routing generate(const at::Tensor& x, const RouterChoice& choice) const;

 private:
  Routing route(const at::Tensor& x, const at::Tensor& given, bool generates) const;
  // True for a choice by softmax whose weights have the logits' dtype.
  bool chooses_in_one_kernel(const at::Tensor& x) const;

  const ModelSetup& setup_;
  at::Tensor weight_, bias_, expert_bias_;
};

}  // namespace ferry::models
