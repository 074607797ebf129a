// The families that are known, by what config.json calls them.
#pragma once

#include <string_view>

#include "converter/families/family.h"
#include "models/spec/transformer_config.h"

namespace ferry::converter {

// Throws Error(kLayout) that lists the known ones.
const Family& find_family(std::string_view model_type);

// The row of a section that a name stands for, whether the model has it or not; null: it is another
// section's.
const models::ParameterRow* row_of(const models::ParameterSection& section, const HfName& name);

// The family whose tensors a configuration without a name has: Megatron's arguments do not say it.
// Throws Error(kLayout) if no family has such models.
std::string_view infer_family(const models::TransformerConfig& config);

}  // namespace ferry::converter
