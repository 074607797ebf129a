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

// Gives gated attention the name and the order of rows that slime's first checkpoints of Qwen3-Next
// have, `linear_qgkv`, where `outline` has that name. A group's queries are rows of the first half
// of q_proj there, its gates rows of the second, whatever heads these are of: slime cuts q_proj in
// two (slime_plugins/mbridge/qwen3_next.py) and joins the halves again.
void use_gated_names(const TensorOutline& outline, ModelMap& map);

}  // namespace ferry::converter
