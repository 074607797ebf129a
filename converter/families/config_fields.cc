#include "converter/families/config_fields.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/json.h"

namespace ferry::converter {

using models::TransformerConfig;
using nlohmann::json;
namespace {

// Every decoder_sparse_step-th layer, but those that are named.
std::vector<bool> sparse_layers(const ConfigFields& fields, std::int64_t num_layers) {
  const auto step = fields.size("decoder_sparse_step", 1);
  std::vector<bool> moe;
  for (std::int64_t i = 0; i < num_layers; ++i) moe.push_back((i + 1) % step == 0);
  if (const auto* dense = fields.find("mlp_only_layers")) {
    require(dense->is_array(), ErrorKind::kCorrupt, "{}: mlp_only_layers is not a list",
            fields.source());
    for (const auto& layer : *dense) {
      const auto index = distckpt::json_int(layer, "mlp_only_layers", fields.source());
      if (index >= 0 && index < num_layers) moe[static_cast<std::size_t>(index)] = false;
    }
  }
  return moe;
}

}  // namespace

ConfigFields::ConfigFields(const json& object, std::string source)
    : object_(object), source_(std::move(source)) {
  require(object.is_object(), ErrorKind::kCorrupt, "{}: not a JSON object", source_);
}

const json* ConfigFields::find(std::string_view key) const {
  const auto found = object_.find(std::string(key));
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

bool ConfigFields::is_null(std::string_view key) const {
  const auto found = object_.find(std::string(key));
  return found != object_.end() && found->is_null();
}

std::int64_t ConfigFields::size(std::string_view key,
                                std::optional<std::int64_t> otherwise,
                                std::int64_t limit) const {
  const auto* value = find(key);
  if (value == nullptr && otherwise) return *otherwise;
  const auto size = distckpt::json_int(value != nullptr ? *value : required(key), key, source_);
  require(size >= 1 && size <= limit, ErrorKind::kCorrupt, "{}: {} is {}, expected 1 to {}",
          source_, key, size, limit);
  return size;
}

std::optional<std::int64_t> ConfigFields::optional_size(std::string_view key) const {
  return find(key) != nullptr ? std::optional(size(key)) : std::nullopt;
}

std::int64_t ConfigFields::count(std::string_view key,
                                 std::int64_t otherwise,
                                 std::int64_t limit) const {
  const auto* value = find(key);
  if (value == nullptr) return otherwise;
  const auto count = distckpt::json_int(*value, key, source_);
  require(count >= 0 && count <= limit, ErrorKind::kCorrupt, "{}: {} is {}, expected 0 to {}",
          source_, key, count, limit);
  return count;
}

std::optional<double> ConfigFields::optional_number(std::string_view key) const {
  const auto* value = find(key);
  if (value == nullptr) return std::nullopt;
  require(value->is_number(), ErrorKind::kCorrupt, "{}: {} is {}, a number is expected", source_,
          key, distckpt::python_json(*value));
  const auto number = value->get<double>();
  require(std::isfinite(number), ErrorKind::kCorrupt, "{}: {} is not finite", source_, key);
  return number;
}

bool ConfigFields::flag(std::string_view key, bool otherwise) const {
  const auto* value = find(key);
  if (value == nullptr) return otherwise;
  require(value->is_boolean(), ErrorKind::kCorrupt, "{}: {} is {}, true or false is expected",
          source_, key, distckpt::python_json(*value));
  return value->get<bool>();
}

std::string ConfigFields::text(std::string_view key, std::string_view otherwise) const {
  const auto* value = find(key);
  return value == nullptr ? std::string(otherwise) : distckpt::json_string(*value, key, source_);
}

const json& ConfigFields::required(std::string_view key) const {
  return distckpt::json_at(object_, key, source_);
}

void read_linear_biases(const ConfigFields& fields, TransformerConfig& config) {
  const bool attention_bias = fields.flag("attention_bias", false);
  const bool mlp_bias = fields.flag("mlp_bias", false);
  require(!attention_bias || mlp_bias, ErrorKind::kLayout,
          "{}: attention_bias without mlp_bias has no counterpart in Megatron-Core",
          fields.source());
  require(!mlp_bias || attention_bias, ErrorKind::kLayout,
          "{}: mlp_bias without attention_bias has no counterpart in Megatron-Core",
          fields.source());
  config.add_bias_linear = attention_bias;
}

std::optional<std::vector<bool>> layers_of_kind(const ConfigFields& fields,
                                                std::string_view key,
                                                std::string_view kind,
                                                std::string_view other,
                                                std::int64_t num_layers) {
  const auto* types = fields.find(key);
  if (types == nullptr) return std::nullopt;
  require(types->is_array() && static_cast<std::int64_t>(types->size()) == num_layers,
          ErrorKind::kCorrupt, "{}: {} is no list of {} layers", fields.source(), key, num_layers);
  std::vector<bool> layers;
  for (const auto& type : *types) {
    const auto name = distckpt::json_string(type, key, fields.source());
    require(name == kind || name == other, ErrorKind::kLayout,
            "{}: {} names \"{}\", which is not handled", fields.source(), key, name);
    layers.push_back(name == kind);
  }
  return layers;
}

void read_dense_layers(const ConfigFields& fields, TransformerConfig& config) {
  if (auto sparse =
          layers_of_kind(fields, "mlp_layer_types", "sparse", "dense", config.num_layers)) {
    config.moe_layer_freq = std::move(*sparse);
    return;
  }
  const auto* first = fields.find("first_k_dense_replace");
  const auto num_dense =
      first == nullptr ? 0 : distckpt::json_int(*first, "first_k_dense_replace", fields.source());
  config.moe_layer_freq.assign(static_cast<std::size_t>(config.num_layers), true);
  std::fill_n(config.moe_layer_freq.begin(), std::min(config.num_layers, num_dense), false);
}

void read_expert_groups(const ConfigFields& fields, TransformerConfig& config) {
  const auto groups = fields.optional_size("n_group").value_or(1);
  if (groups > 1) {
    config.moe_router_num_groups = groups;
    config.moe_router_group_topk = fields.size("topk_group", 1);
  }
  config.moe_router_topk_scaling_factor =
      fields.optional_number("routed_scaling_factor").value_or(1.0);
}

void read_deepseek_experts(const ConfigFields& fields, TransformerConfig& config) {
  config.num_moe_experts = fields.size("n_routed_experts", std::nullopt, kMaxExperts);
  require(fields.size("moe_layer_freq", 1) == 1, ErrorKind::kLayout,
          "{}: moe_layer_freq is not 1, which is not handled", fields.source());
  read_dense_layers(fields, config);
  config.moe_ffn_hidden_size = fields.size("moe_intermediate_size");
  config.moe_shared_expert_intermediate_size =
      fields.count("n_shared_experts", 0, kMaxExperts) * config.moe_ffn_hidden_size;
  config.moe_router_topk = fields.size("num_experts_per_tok", 8);
  config.moe_router_pre_softmax = true;
  read_expert_groups(fields, config);
}

void require_normed_weights(const ConfigFields& fields) {
  require(fields.flag("norm_topk_prob", !fields.is_null("norm_topk_prob")), ErrorKind::kLayout,
          "{}: norm_topk_prob is false, which is not handled", fields.source());
}

void require_sigmoid_scores(const ConfigFields& fields) {
  constexpr auto kSigmoid = name_of(models::ScoreFunction::kSigmoid);
  const auto score = fields.text("scoring_func", kSigmoid);
  require(score == kSigmoid, ErrorKind::kLayout,
          "{}: scoring_func is \"{}\", only \"{}\" is handled", fields.source(), score, kSigmoid);
}

void read_qwen_experts(const ConfigFields& fields, TransformerConfig& config) {
  read_linear_biases(fields, config);
  // transformers 5 writes num_local_experts beside or instead of num_experts.
  const auto experts = fields.optional_size("num_local_experts");
  config.num_moe_experts = fields.size("num_experts", experts, kMaxExperts);
  config.moe_layer_freq = sparse_layers(fields, config.num_layers);
  config.moe_ffn_hidden_size = fields.size("moe_intermediate_size");
  config.moe_router_pre_softmax = !fields.flag("norm_topk_prob", false);
}

std::vector<bool> sliding_layers(const ConfigFields& fields,
                                 std::int64_t num_layers,
                                 const std::function<bool(std::int64_t)>& otherwise) {
  if (auto named =
          layers_of_kind(fields, "layer_types", kLocalAttention, "full_attention", num_layers))
    return std::move(*named);
  std::vector<bool> sliding;
  for (std::int64_t i = 0; i < num_layers; ++i) sliding.push_back(otherwise(i));
  return sliding;
}

double read_local_base(const ConfigFields& fields, double otherwise) {
  const auto* const of_layers = fields.find("rope_parameters");
  if (of_layers == nullptr || !of_layers->is_object()) return otherwise;
  const ConfigFields kinds(*of_layers, fields.source());
  const auto* const found = kinds.find(kLocalAttention);
  if (found == nullptr) return otherwise;
  const ConfigFields local(
      *found, fmt::format("{}: rope_parameters of {}", fields.source(), kLocalAttention));
  const auto type = local.text("rope_type", "default");
  require(type == "default", ErrorKind::kLayout, "{}: rope_type is \"{}\", which is not handled",
          local.source(), type);
  return local.optional_number("rope_theta").value_or(otherwise);
}

void set_window_layers(const ConfigFields& fields,
                       const std::function<bool(std::int64_t)>& otherwise,
                       TransformerConfig& config) {
  if (!config.sliding_window) return;
  const auto sliding = sliding_layers(fields, config.num_layers, otherwise);
  if (std::ranges::none_of(sliding, std::identity())) config.sliding_window.reset();
  if (config.sliding_window && !std::ranges::all_of(sliding, std::identity()))
    config.window_attn_skip_freq = sliding;
}

void read_used_window(const ConfigFields& fields, TransformerConfig& config) {
  if (fields.flag("use_sliding_window", false))
    config.sliding_window = fields.optional_size("sliding_window");
}

void read_qwen_window(const ConfigFields& fields, TransformerConfig& config) {
  read_used_window(fields, config);
  const auto first = fields.count("max_window_layers", kMaxWindowLayers, kMaxSize);
  set_window_layers(
      fields, [first](std::int64_t layer) { return layer >= first; }, config);
}

namespace {

std::vector<std::int64_t> sizes_of(const ConfigFields& fields, std::string_view key) {
  std::vector<std::int64_t> sizes;
  const auto* const list = fields.find(key);
  if (list == nullptr) return sizes;
  require(list->is_array(), ErrorKind::kCorrupt, "{}: {} is not a list", fields.source(), key);
  for (const auto& value : *list) {
    const auto size = distckpt::json_int(value, key, fields.source());
    require(size >= 0 && size < kMaxSize, ErrorKind::kCorrupt, "{}: {} holds {}", fields.source(),
            key, size);
    sizes.push_back(size);
  }
  return sizes;
}

// The sections of a head's frequencies, if they take turns as Qwen3-VL's do.
std::vector<std::int64_t> read_mrope_section(const ConfigFields& text) {
  const auto* rope = text.find("rope_parameters");
  if (rope == nullptr) rope = text.find("rope_scaling");
  if (rope == nullptr || !rope->is_object()) return {};
  return sizes_of(ConfigFields(*rope, text.source()), "mrope_section");
}

void read_vision(const ConfigFields& all, TransformerConfig& config) {
  const auto* const object = all.find("vision_config");
  const auto* const text = all.find("text_config");
  if (object == nullptr || text == nullptr) return;
  const ConfigFields fields(*object, fmt::format("{}: vision_config", all.source()));
  models::VisionConfig vision{
      .depth = fields.size("depth", 27, kMaxLayers),
      .hidden_size = fields.size("hidden_size", 1152),
      .intermediate_size = fields.size("intermediate_size", 4304),
      .num_heads = fields.size("num_heads", 16, kMaxHeads),
      .in_channels = fields.size("in_channels", 3),
      .patch_size = fields.size("patch_size", 16),
      .temporal_patch_size = fields.size("temporal_patch_size", 2),
      .spatial_merge_size = fields.size("spatial_merge_size", 2),
      .out_hidden_size = fields.size("out_hidden_size", 3584),
      .num_position_embeddings = fields.size("num_position_embeddings", 2304),
      .deepstack_visual_indexes = {8, 16, 24},
      .image_token_id = all.size("image_token_id", 151655)};
  constexpr auto kBlocksHave = name_of(models::Activation::kGeluTanh);
  if (const auto activation = fields.text("hidden_act", kBlocksHave); activation != kBlocksHave) {
    vision.problem = fmt::format("{}: hidden_act is \"{}\", only \"{}\" is computed",
                                 fields.source(), activation, kBlocksHave);
  }
  if (fields.find("deepstack_visual_indexes") != nullptr)
    vision.deepstack_visual_indexes = sizes_of(fields, "deepstack_visual_indexes");
  if (const auto* const rope = fields.find("rope_parameters"); rope != nullptr) {
    vision.rotary_base =
        ConfigFields(*rope, fields.source()).optional_number("rope_theta").value_or(10000.0);
  }
  config.vision = std::move(vision);
  config.mrope_section = read_mrope_section(ConfigFields(*text, all.source()));
  if (config.mrope_section.empty()) config.mrope_section = {24, 20, 20};
}

}  // namespace

void read_qwen3_vision(const ConfigFields& all, TransformerConfig& config) {
  auto seeing = config;
  try {
    read_vision(all, seeing);
  } catch (const Error&) {
    return;  // described in other words: the tower is carried, and not computed
  }
  config = std::move(seeing);
}

}  // namespace ferry::converter
