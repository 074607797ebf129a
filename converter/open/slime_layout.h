// The place of gated delta nets in checkpoints of slime, whose module is Hugging Face's own: each
// tensor under its Hugging Face name below "self_attention.", whole on every rank and as it is.
#pragma once

#include "converter/families/model_map.h"
#include "converter/stored/stored.h"

namespace ferry::converter {

// True if a checkpoint of these keys is kept so.
bool is_slime_layout(const TensorOutline& outline);

// The parameters of the same model in that layout: of tensors that are `map.tensors`, too. Throws
// Error(kUsage) for a family without delta nets.
ModelMap in_slime_layout(const ModelMap& map);

// Gives gated attention the name that slime's checkpoints of Qwen3-Next had until 2025-12-23,
// `linear_qgkv`, where `outline` has that name. Its rows are those of linear_qkv
// (slime_plugins/mbridge/qwen3_next.py at 08118ec).
void use_gated_names(const TensorOutline& outline, ModelMap& map);

}  // namespace ferry::converter
