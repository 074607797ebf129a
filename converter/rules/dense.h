// The dense decoder: Llama, Mistral, Qwen2 and Qwen3 differ in which rows apply.
#pragma once

#include "converter/rules/rule.h"

namespace ferry::converter {

extern const RuleTable kDenseRules;

}  // namespace ferry::converter
