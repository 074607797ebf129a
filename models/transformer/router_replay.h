// Which experts the tokens of a forward pass go to: as its routers choose, or as those of another
// pass chose (Megatron-Core transformer/moe/router_replay.py; "Stabilizing MoE Reinforcement
// Learning by Aligning Training and Inference Routers", arXiv:2510.11370). Weights of experts are
// always those of this pass's own scores, at the experts that are given: gradients flow through
// them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <map>

namespace ferry::models {

// What the numbers of experts are kept and sent as, of a model with so many.
inline at::ScalarType routed_experts_type(std::int64_t num_moe_experts) {
  return num_moe_experts <= 256 ? at::kByte : at::kShort;
}

// Of one layer. Rows are those of the router: tensor parallel ranks share out the tokens of their
// context parallel part, in equal parts.
struct RouterChoice {
  // [rows, topk], int64; undefined, or a row of negative numbers: the router chooses.
  at::Tensor given{};
  std::function<void(const at::Tensor& experts)> record{};  // is shown [rows, topk]; may be empty
};

// Of all layers with experts of a chunk, by their numbers in the model.
struct RouterReplay {
  std::map<std::int64_t, at::Tensor> experts{};  // `given` of each; a layer without: it chooses
  std::function<void(std::int64_t layer, const at::Tensor& experts)> record{};  // may be empty

  RouterChoice of(std::int64_t layer) const {
    const auto found = experts.find(layer);
    RouterChoice choice{.given = found == experts.end() ? at::Tensor() : found->second};
    if (record)
      choice.record = [record = record, layer](const at::Tensor& chosen) { record(layer, chosen); };
    return choice;
  }
};

}  // namespace ferry::models
