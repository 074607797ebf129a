// A part of a model in the place of the whole: what is not selected leaves the map, and what stores
// it is stated to be left out.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "converter/families/model_map.h"
#include "converter/open/checkpoint.h"
#include "converter/stored/selection.h"

namespace ferry::converter {

// Throws as make_model_map does.
ModelMap make_part_map(const models::TransformerConfig& config, const Part& part);

// Tensor i of those that `map` links is now tensor at[i], or gone: what stores it, its scales and
// its padding are then left out.
void restrict_links(distckpt::TensorMap& map,
                    const distckpt::Layout& layout,
                    const std::vector<std::optional<std::uint32_t>>& at);

// `checkpoint` holds only what is selected, and knows it. The Hugging Face files' headers are those
// of the whole: they are not kept.
void restrict_checkpoint(Checkpoint& checkpoint, const Selection& selection);

}  // namespace ferry::converter
