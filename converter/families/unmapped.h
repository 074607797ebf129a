// The reason why a tensor of a Hugging Face folder is none of its model's: its config.json, mostly.
#pragma once

#include <string>
#include <string_view>

#include "converter/families/model_map.h"

namespace ferry::converter {

// A hint such as "config.json says that there are 4 experts (num_experts)"; empty if the family has
// no such tensor at all.
std::string why_unmapped(const ModelMap& map, std::string_view hf_name);

}  // namespace ferry::converter
