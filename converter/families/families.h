// The families that are known: what config.json calls them, and the rules of each.
#pragma once

#include <span>
#include <string_view>

#include "converter/families/rule.h"
#include "models/spec/transformer_config.h"

namespace ferry::converter {

struct Family {
  std::string_view model_type{};  // of config.json
  const RuleTable* rules = nullptr;
};

std::span<const Family> families();

// Throws Error(kLayout) that lists the known ones.
const Family& find_family(std::string_view model_type);

// The family whose tensors a configuration without a name has: Megatron's arguments do not say it.
std::string_view infer_family(const models::TransformerConfig& config);

}  // namespace ferry::converter
