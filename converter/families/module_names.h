// The names of modules' tensors, as state_dict() gives them, as keys of checkpoints: formats that
// save modules name layers and experts by their place on a rank.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace ferry::converter {

// "….mlp.experts.local_experts.3.linear_fc1.weight" and "….mlp.experts.linear_fc1.weight3" taken
// apart.
struct ModuleExpert {
  std::string prefix{};  // "….mlp.experts."
  std::int64_t index = 0;
  std::string rest{};  // "linear_fc1.weight"
};
std::optional<ModuleExpert> parse_module_expert(std::string_view name);

// "decoder.layers.3.rest" taken apart: 3 and "rest".
struct ModuleLayer {
  std::int64_t index = 0;
  std::string_view rest{};
};
std::optional<ModuleLayer> parse_module_layer(std::string_view name);

// The key, with `first_layer` and `first_expert` added to the indices. As Hugging Face counts them
// they are those of the whole model: "decoder.layers.3.mlp.experts.experts.7.linear_fc1.weight".
std::string key_of_module(std::string_view name,
                          std::int64_t first_layer,
                          std::int64_t first_expert);

// State that layers keep beside their tensors.
bool is_extra_state(std::string_view name);

}  // namespace ferry::converter
