// Zeros that complete an adapter where a form has factors of one rank (Megatron-Bridge, vLLM,
// SGLang), or of all modules of a kind (Megatron-Bridge). The product B A stays as it is: to the
// sum over the rank come terms whose column of B and whose row of A are zeros. Both have no
// gradient, so that training leaves them zeros.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "converter/adapter/factors/adapter_map.h"
#include "converter/open/checkpoint.h"

namespace ferry::converter {

// Gives all parameters the largest rank, if the factors of their products are equal: else alpha /
// rank would not be one number for all.
void raise_to_one_rank(std::span<AdaptedParameter> adapted, std::span<const float> scaling);

// The parameters that Megatron-Bridge has factors of beside those of an adapter, with their rank:
// the same of the other layers, which Megatron-Core keeps in one tensor and reads whole; and with
// query, key or value, or gate or up, the others of the parameter: CanonicalLoRA makes modules of a
// part alone and cannot use them (canonical_lora.py, ModuleDict of None).
std::vector<AdaptedParameter> missing_modules(const ModelMap& base,
                                              std::span<const AdaptedParameter> adapted);

// Links `whole.stored`, which is smaller along a dimension than `whole.model_box`, and zeros for
// the rest. The dimension is of so many blocks, each of which ends in zeros.
void link_beside_zeros(Checkpoint& adapter,
                       const distckpt::BoxLink& whole,
                       int dim,
                       std::int64_t blocks = 1);

// Links zeros to tensors that nothing is linked to, in the dtype of the first that has some.
void link_zeros(Checkpoint& adapter);

}  // namespace ferry::converter
