// The factors of experts as tensors of their own, one pair for each projection of each expert:
// "model.layers.0.mlp.experts.3.gate_proj.lora_A.weight" [rank, in]. vLLM and SGLang read them so,
// and PEFT saves them so where experts are modules.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "converter/adapter/factors/adapter_map.h"

namespace ferry::converter {

enum class ExpertNames {
  kTogether,  // all experts of a layer in two tensors (PEFT's target_parameters)
  kApart,     // as above
};

// A tensor of an adapter's file, and what it is of the adapter's map; `link.stored` is for whoever
// places the tensor.
struct StoredFactor {
  std::string name{};
  distckpt::Shape shape{};
  distckpt::BoxLink link{};
};

// The factors of the parameters that are experts'; `adapter` is make_adapter_map(base, adapted).
// The first factor of gate is that of up: a second copy. Throws Error(kLayout) for a base whose
// files have no names for single experts.
std::vector<StoredFactor> expert_factors(const ModelMap& base,
                                         const ModelMap& adapter,
                                         std::span<const AdaptedParameter> adapted);

// Throws Error(kLayout) naming a layer of which some experts are adapted and others are not, or
// with another rank.
void require_all_experts(const ModelMap& base, std::span<const AdaptedParameter> adapted);

}  // namespace ferry::converter
