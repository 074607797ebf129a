#include "converter/open/slime_layout.h"

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "converter/families/megatron_links.h"
#include "converter/families/tower.h"
#include "distckpt/base/error.h"

namespace ferry::converter {
namespace {

constexpr std::string_view kModule = "self_attention.";
constexpr std::string_view kDeltaNet = ".self_attention.linear_attn.";

// The prefix of a module of a delta net's layer in Megatron's keys; nothing of another one.
std::optional<std::string> delta_net_of(const ModelMap& map,
                                        Stage stage,
                                        const std::optional<std::int64_t>& layer,
                                        std::string_view key) {
  if (stage != Stage::kLayer || !layer || !map.config.is_linear_attention_layer(*layer))
    return std::nullopt;
  auto prefix = fmt::format("{}{}.{}", models::kDecoderLayers, *layer, kModule);
  return key.starts_with(prefix) ? std::optional(std::move(prefix)) : std::nullopt;
}

// The older name of a key of gated attention's first product, or of its state; nothing of others.
std::optional<std::string> gated_name(std::string_view key) {
  constexpr std::string_view kName = "self_attention.linear_qkv.";
  constexpr std::string_view kOlder = "self_attention.linear_qgkv.";
  const auto at = key.find(kName);
  if (at == std::string_view::npos) return std::nullopt;
  return std::string(key).replace(at, kName.size(), kOlder);
}

}  // namespace

bool is_slime_layout(const TensorOutline& outline) {
  return std::ranges::any_of(outline, [](const auto& tensor) {
    return tensor.first.find(kDeltaNet) != std::string::npos && !is_training_state(tensor.first);
  });
}

ModelMap in_slime_layout(const ModelMap& map) {
  require(map.config.has_linear_attention(), ErrorKind::kUsage,
          "--megatron-layout {}: models of the family {} have no gated delta nets, and are kept as "
          "they are",
          layout_name(MegatronLayout::kSlime), map.family->model_type);
  auto result = map;
  result.megatron.clear();
  std::set<std::uint32_t> added;
  for (const auto& tensor : map.megatron) {
    const auto prefix = delta_net_of(map, tensor.stage, tensor.layer, tensor.key);
    if (!prefix) {
      result.megatron.push_back(tensor);
      continue;
    }
    const auto hf = fill_in(map.family->names->layer, kLayerMark, *tensor.layer);
    for (const auto& part : tensor.parts) {
      if (!added.insert(part.model).second) continue;
      const auto& model = map.tensors[part.model];
      auto& whole = result.megatron.emplace_back(tensor);
      whole.key = *prefix + model.name.substr(hf.size());
      whole.stacked_key.clear();
      whole.also.clear();
      whole.shape = model.shape;
      whole.merge = Merge::kCopy;
      whole.split = Split::kNone;
      whole.less_one = false;
      whole.unused.clear();
      whole.parts.clear();
      whole.parts.push_back({.model = part.model,
                             .model_box = distckpt::Box::whole(model.shape),
                             .box = distckpt::Box::whole(model.shape)});
    }
  }
  std::erase_if(result.extra_states, [&](const MegatronObject& state) {
    return delta_net_of(map, state.stage, state.layer, state.object.key).has_value();
  });
  return result;
}

void use_gated_names(const TensorOutline& outline, ModelMap& map) {
  std::set<std::string, std::less<>> stored;
  for (const auto& tensor : outline) stored.emplace(models::strip_wrappers(tensor.first));
  for (auto& tensor : map.megatron) {
    const auto name = gated_name(tensor.key);
    if (!name || !stored.contains(*name)) continue;
    tensor.key = *name;
    tensor.stacked_key.clear();
    tensor.also.clear();
  }
  for (auto& state : map.extra_states) {
    const auto name = gated_name(state.object.key);
    const auto weight =
        name ? name->substr(0, name->rfind("._extra_state")) + ".weight" : std::string();
    if (stored.contains(weight)) state.object.key = *name;
  }
}

}  // namespace ferry::converter
