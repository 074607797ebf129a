// SmolLM3: Llama, some of whose layers do not know positions.
#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <utility>

#include "converter/families/family.h"
#include "distckpt/base/error.h"
#include "distckpt/base/json.h"

namespace ferry::converter {
namespace {

using models::TransformerConfig;

// no_rope_layers: the layers that it has a 0 for, or every no_rope_layer_interval-th.
std::vector<bool> layers_without_rope(const ConfigFields& fields, std::int64_t num_layers) {
  const auto every = fields.size("no_rope_layer_interval", 4);
  const auto* const turning = fields.find("no_rope_layers");
  require(turning == nullptr ||
              (turning->is_array() && static_cast<std::int64_t>(turning->size()) >= num_layers),
          ErrorKind::kCorrupt, "{}: no_rope_layers is no list of {} layers", fields.source(),
          num_layers);
  std::vector<bool> layers;
  for (std::int64_t i = 0; i < num_layers; ++i) {
    layers.push_back(turning == nullptr
                         ? (i + 1) % every == 0
                         : distckpt::json_int((*turning)[static_cast<std::size_t>(i)],
                                              "no_rope_layers", fields.source()) == 0);
  }
  return layers;
}

void read_smollm3(const ConfigFields& fields, TransformerConfig& config) {
  read_linear_biases(fields, config);
  auto without = layers_without_rope(fields, config.num_layers);
  const auto has_none = [&](std::int64_t layer) {
    return without[static_cast<std::size_t>(layer)];
  };
  const bool windows = fields.flag("use_sliding_window", false);
  config.sliding_window = fields.optional_size("sliding_window");
  set_window_layers(
      fields, [&](std::int64_t layer) { return windows && has_none(layer); }, config);
  if (std::ranges::any_of(without, std::identity())) config.no_rope_freq = std::move(without);
}

constexpr Family kSmol[] = {
    {.model_type = "smollm3",
     .names = &kLlamaNames,
     .defaults = R"({"num_key_value_heads": 4, "max_position_embeddings": 32768})",
     .rotary_base = 2e6,
     .tied = true,
     .head_classes = HeadClasses::kOfSequencesAndTokens,
     .configure = read_smollm3,
     .describes =
         [](const TransformerConfig& config) {
           return !config.no_rope_freq.empty() && !config.qk_layernorm &&
                  !config.multi_latent_attention && config.num_moe_experts == 0;
         },
     .rare = true},
};

}  // namespace

const std::span<const Family> kSmolFamilies = kSmol;

}  // namespace ferry::converter
