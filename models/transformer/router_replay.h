// Router replay: the experts of the tokens of a forward pass are chosen by its routers, or given by
// those of another pass (Megatron-Core transformer/moe/router_replay.py; "Stabilizing MoE
// Reinforcement Learning by Aligning Training and Inference Routers", arXiv:2510.11370). Weights of
// given experts still come from this pass's own scores, so that gradients flow through them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <map>

namespace ferry::models {

struct Routing;

// Gets the routing of a layer in a pass that is learned from, once. Returns its weights, with the
// same values, through which further gradients may flow.
using RoutingHook = std::function<at::Tensor(std::int64_t layer, const Routing& routing)>;

// The dtype in which indices of experts are stored and sent, for a model with so many experts.
inline at::ScalarType routed_experts_type(std::int64_t num_moe_experts) {
  return num_moe_experts <= 256 ? at::kByte : at::kShort;
}

// The hooks and given experts of one layer. Rows are those of its router: each tensor parallel rank
// routes an equal part of the tokens of its context parallel part.
struct RouterChoice {
  // [rows, topk], int64; undefined, or a row of negative numbers: the router chooses.
  at::Tensor given{};
  std::function<void(const at::Tensor& experts)> record{};  // gets [rows, topk]; may be empty
  std::function<at::Tensor(const Routing&)> balance{};      // may be empty
};

// The same for a chunk's layers with experts, by their indices in the model.
struct RouterReplay {
  std::map<std::int64_t, at::Tensor> experts{};  // `given` of each; other layers' routers choose
  std::function<void(std::int64_t layer, const at::Tensor& experts)> record{};  // may be empty
  RoutingHook balance{};                                                        // the same

  RouterChoice of(std::int64_t layer) const {
    const auto found = experts.find(layer);
    RouterChoice choice{.given = found == experts.end() ? at::Tensor() : found->second};
    if (record)
      choice.record = [record = record, layer](const at::Tensor& chosen) { record(layer, chosen); };
    if (balance)
      choice.balance = [hook = balance, layer](const Routing& of) { return hook(layer, of); };
    return choice;
  }
};

}  // namespace ferry::models
