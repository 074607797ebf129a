// The tables, one for each kind of model; families.cc says which family has which.
#pragma once

#include "converter/families/rule.h"

namespace ferry::converter {

extern const RuleTable
    kDenseRules;  // Llama, Mistral, Qwen2, Qwen3: they differ in which rows apply
extern const RuleTable kMixtralRules;   // Mixtral
extern const RuleTable kQwenMoeRules;   // Qwen2-MoE, Qwen3-MoE
extern const RuleTable kDeepSeekRules;  // DeepSeek-V2, DeepSeek-V3, Moonlight

}  // namespace ferry::converter
