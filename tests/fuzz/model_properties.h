// What holds of every configuration that was read, whatever it was read from.
#pragma once

#include "distckpt/transformer_config.h"

namespace ferry::fuzz {

// Its sizes can be reckoned with, and its two sides fit together: every element of every tensor of
// the one is one element of the other.
void expect_sound(const distckpt::TransformerConfig& config);

// Megatron's arguments, written for it, are read as the same model.
void expect_args_alike(const distckpt::TransformerConfig& config);

}  // namespace ferry::fuzz
