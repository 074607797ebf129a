#include "converter/open/prediction_layers.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "converter/families/families.h"
#include "converter/families/hf_config.h"
#include "converter/families/megatron_args.h"
#include "distckpt/base/error.h"
#include "distckpt/formats/torch_dist.h"

namespace ferry::converter {
namespace {

// The model that the checkpoint says it is, as far as it says it.
models::TransformerConfig described(const Stored& stored) {
  if (stored.hf) return parse_hf_config(stored.hf->config_text(), stored.hf->config_source());
  const auto config =
      stored.common ? read_args(distckpt::common_dict(*stored.common)) : std::nullopt;
  return config.value_or(models::TransformerConfig());
}

bool is_megatron_prediction(std::string_view key) {
  return language_model_key(key).starts_with(models::kPredictionLayers);
}

std::int64_t num_named(const Stored& stored, const models::TransformerConfig& config) {
  return stored.hf ? named_prediction_layers(stored.hf->config_text(), stored.hf->config_source())
                   : config.mtp_num_layers;
}

void take_out(const auto& is_prediction, const auto& is_derived_prediction, Stored& stored) {
  distckpt::Layout rest;
  for (const auto& storage : stored.layout.storages()) rest.add_storage(storage);
  for (const auto& tensor : stored.layout.tensors()) {
    if (!is_prediction(tensor.name)) rest.add_tensor(tensor);
  }
  stored.layout = std::move(rest);
  std::erase_if(stored.replicas, [&](const Replica& one) { return is_prediction(one.of); });
  std::erase_if(stored.objects, is_prediction);
  if (stored.derived) std::erase_if(stored.derived->entries, is_derived_prediction);
  if (stored.hf) stored.hf->leave_prediction_layers();
}

}  // namespace

std::optional<PredictionLayers> prediction_layers(std::string_view name) {
  if (name == "keep") return PredictionLayers::kKeep;
  if (name == "drop") return PredictionLayers::kDrop;
  return name == "error" ? std::optional(PredictionLayers::kError) : std::nullopt;
}

void apply_prediction_policy(PredictionLayers policy, const Location& location, Stored& stored) {
  if (policy == PredictionLayers::kKeep) return;
  const auto config = described(stored);
  const auto is_prediction = [&](std::string_view name) {
    return stored.megatron_names ? is_megatron_prediction(name)
                                 : is_prediction_tensor(config, name);
  };
  const auto is_derived_prediction = [&](const distckpt::SafetensorsEntry& entry) {
    return is_prediction_tensor(config, entry.name);
  };
  const auto& tensors = stored.layout.tensors();
  const bool are_there =
      std::ranges::any_of(tensors, is_prediction, &distckpt::TensorLayout::name) ||
      std::ranges::any_of(stored.outline, is_prediction, &TensorOutline::value_type::first) ||
      (stored.derived && std::ranges::any_of(stored.derived->entries, is_derived_prediction));
  const auto named = num_named(stored, config);
  if (policy == PredictionLayers::kError) {
    if (named == 0 || are_there) return;
    const auto& keys = family_of(config.family).prediction.keys;
    throw Error(ErrorKind::kLayout,
                fmt::format("{}: names {} prediction layer{} ({}), and holds no tensor of one",
                            location.folder.string(), named, named == 1 ? "" : "s",
                            stored.hf && !keys.empty() ? keys.front() : "mtp_num_layers"),
                "--mtp drop converts the model without them, and says so in config.json");
  }
  require(named > 0 || are_there, ErrorKind::kUsage,
          "--mtp drop: has no effect: {} has no prediction layers", location.folder.string());
  require(!stored.assemble, ErrorKind::kUsage,
          "--mtp drop: {} is read rank by rank; convert it as it is, and then what became of it",
          location.folder.string());
  take_out(is_prediction, is_derived_prediction, stored);
}

}  // namespace ferry::converter
