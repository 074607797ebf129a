// Properties of every configuration that was read, from any file.
#pragma once

#include "models/spec/transformer_config.h"

namespace ferry::fuzz {

// Its sizes can be reckoned with, and its two sides fit together: every element of every tensor of
// the one is one element of the other.
void expect_sound(const models::TransformerConfig& config);

// Megatron's arguments, written for it, are read as the same model.
void expect_args_alike(const models::TransformerConfig& config);

}  // namespace ferry::fuzz
