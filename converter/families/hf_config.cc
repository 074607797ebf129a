#include "converter/families/hf_config.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <functional>
#include <optional>
#include <vector>

#include "converter/families/config_limits.h"
#include "converter/families/families.h"
#include "distckpt/base/error.h"
#include "distckpt/base/json.h"

namespace ferry::converter {
namespace {

using models::Head;
using models::RopeScaling;
using models::TransformerConfig;
using nlohmann::json;

// Reads members of one JSON object; an absent or null member is "not given".
class Fields {
 public:
  Fields(const json& object, std::string source) : object_(object), source_(std::move(source)) {
    require(object.is_object(), ErrorKind::kCorrupt, "{}: not a JSON object", source_);
  }

  const json* find(std::string_view key) const {
    const auto found = object_.find(std::string(key));
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }

  std::int64_t size(std::string_view key,
                    std::optional<std::int64_t> otherwise = std::nullopt,
                    std::int64_t limit = kMaxSize) const {
    const auto* value = find(key);
    if (value == nullptr && otherwise) return *otherwise;
    const auto size = distckpt::json_int(value != nullptr ? *value : required(key), key, source_);
    require(size >= 1 && size <= limit, ErrorKind::kCorrupt, "{}: {} is {}, expected 1 to {}",
            source_, key, size, limit);
    return size;
  }

  std::optional<std::int64_t> optional_size(std::string_view key) const {
    return find(key) != nullptr ? std::optional(size(key)) : std::nullopt;
  }

  std::optional<double> optional_number(std::string_view key) const {
    const auto* value = find(key);
    if (value == nullptr) return std::nullopt;
    require(value->is_number(), ErrorKind::kCorrupt, "{}: {} is {}, a number is expected", source_,
            key, value->dump());
    const auto number = value->get<double>();
    require(std::isfinite(number), ErrorKind::kCorrupt, "{}: {} is not finite", source_, key);
    return number;
  }

  bool flag(std::string_view key, bool otherwise) const {
    const auto* value = find(key);
    if (value == nullptr) return otherwise;
    require(value->is_boolean(), ErrorKind::kCorrupt, "{}: {} is {}, true or false is expected",
            source_, key, value->dump());
    return value->get<bool>();
  }

  std::string text(std::string_view key, std::string_view otherwise) const {
    const auto* value = find(key);
    return value == nullptr ? std::string(otherwise) : distckpt::json_string(*value, key, source_);
  }

  const json& required(std::string_view key) const {
    return distckpt::json_at(object_, key, source_);
  }
  const std::string& source() const { return source_; }

 private:
  const json& object_;
  std::string source_;
};

RopeScaling parse_rope_scaling(const Fields& fields) {
  // "type" is the older spelling of "rope_type"; where both are given they agree.
  const auto type = fields.text("rope_type", fields.text("type", "default"));
  require(fields.text("type", type) == type, ErrorKind::kCorrupt, "{}: rope_type and type differ",
          fields.source());
  if (type == "default") return {};
  return {
      .type = type,
      .factor = fields.optional_number("factor").value_or(1.0),
      .low_freq_factor = fields.optional_number("low_freq_factor"),
      .high_freq_factor = fields.optional_number("high_freq_factor"),
      .attention_factor = fields.optional_number("attention_factor"),
      .beta_fast = fields.optional_number("beta_fast"),
      .beta_slow = fields.optional_number("beta_slow"),
      .mscale = fields.optional_number("mscale"),
      .mscale_all_dim = fields.optional_number("mscale_all_dim"),
      .original_max_position_embeddings = fields.optional_size("original_max_position_embeddings")};
}

// transformers 5 writes rope_parameters, older ones rope_theta and rope_scaling; a file may hold
// both.
void parse_rope(const Fields& fields, TransformerConfig& config) {
  std::optional<double> theta = fields.optional_number("rope_theta");
  std::optional<RopeScaling> scaling;
  for (const auto* key : {"rope_parameters", "rope_scaling"}) {
    const auto* value = fields.find(key);
    if (value == nullptr) continue;
    const Fields rope(*value, fmt::format("{}: {}", fields.source(), key));
    for (const auto& [name, inner] : value->items()) {
      require(!inner.is_object(), ErrorKind::kLayout,
              "{}: {} differs by kind of layer, which is not handled", fields.source(), key);
    }
    const auto found = parse_rope_scaling(rope);
    require(!scaling || *scaling == found, ErrorKind::kCorrupt,
            "{}: rope_parameters and rope_scaling differ", fields.source());
    scaling = found;
    const auto inner_theta = rope.optional_number("rope_theta");
    require(!theta || !inner_theta || *theta == *inner_theta, ErrorKind::kCorrupt,
            "{}: rope_theta is {}, but {} says {}", fields.source(), theta.value_or(0), key,
            inner_theta.value_or(0));
    if (inner_theta) theta = inner_theta;
  }
  config.rotary_base = theta.value_or(10000.0);
  config.rope_scaling = scaling.value_or(RopeScaling{});
}

// Layers with experts, given how many dense ones come first.
std::vector<bool> dense_first(std::int64_t num_layers, std::int64_t num_dense) {
  std::vector<bool> moe(static_cast<std::size_t>(num_layers), true);
  std::fill_n(moe.begin(), std::min(num_layers, num_dense), false);
  return moe;
}

// Qwen's: every decoder_sparse_step-th layer, but those that are named.
std::vector<bool> sparse_layers(const Fields& fields, std::int64_t num_layers) {
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

// With the experts that config.json names; as it is where no layer has any.
TransformerConfig with_experts(const Fields& fields, const TransformerConfig& dense) {
  auto config = dense;
  const auto& family = config.family;
  const bool deepseek = family == "deepseek_v2" || family == "deepseek_v3";
  const bool qwen = family == "qwen2_moe" || family == "qwen3_moe";
  if (family == "mixtral") {
    config.num_moe_experts = fields.size("num_local_experts", std::nullopt, kMaxExperts);
    config.moe_layer_freq = dense_first(config.num_layers, 0);
    config.moe_ffn_hidden_size = config.ffn_hidden_size;
    config.moe_router_topk = fields.size("num_experts_per_tok", 2);
  } else if (qwen) {
    // transformers 5 writes num_local_experts beside or instead of num_experts.
    const auto experts = fields.optional_size("num_local_experts");
    config.num_moe_experts = fields.size("num_experts", experts, kMaxExperts);
    config.moe_layer_freq = sparse_layers(fields, config.num_layers);
    config.moe_ffn_hidden_size = fields.size("moe_intermediate_size");
    config.moe_router_topk = fields.size("num_experts_per_tok", family == "qwen2_moe" ? 4 : 8);
    config.moe_router_pre_softmax = !fields.flag("norm_topk_prob", false);
    if (family == "qwen2_moe") {
      config.moe_shared_expert_intermediate_size = fields.size("shared_expert_intermediate_size");
      config.moe_shared_expert_gate = true;
    }
  } else if (deepseek) {
    config.num_moe_experts = fields.size("n_routed_experts", std::nullopt, kMaxExperts);
    require(fields.size("moe_layer_freq", 1) == 1, ErrorKind::kLayout,
            "{}: moe_layer_freq is not 1, which is not handled", fields.source());
    const auto first = fields.find("first_k_dense_replace");
    config.moe_layer_freq = dense_first(
        config.num_layers,
        first == nullptr ? 0
                         : distckpt::json_int(*first, "first_k_dense_replace", fields.source()));
    config.moe_ffn_hidden_size = fields.size("moe_intermediate_size");
    config.moe_shared_expert_intermediate_size =
        fields.optional_size("n_shared_experts").value_or(0) * config.moe_ffn_hidden_size;
    config.moe_router_topk = fields.size("num_experts_per_tok", 8);
    config.moe_router_pre_softmax = true;
    const auto groups = fields.optional_size("n_group").value_or(1);
    if (groups > 1) {
      config.moe_router_num_groups = groups;
      config.moe_router_group_topk = fields.size("topk_group", 1);
    }
    config.moe_router_topk_scaling_factor =
        fields.optional_number("routed_scaling_factor").value_or(1.0);
    if (family == "deepseek_v3") {
      config.moe_router_score_function = fields.text("scoring_func", "sigmoid");
      config.moe_router_enable_expert_bias = fields.text("topk_method", "noaux_tc") == "noaux_tc";
    }
  }
  return std::ranges::any_of(config.moe_layer_freq, std::identity()) ? config : dense;
}

void parse_latent_attention(const Fields& fields, TransformerConfig& config) {
  config.multi_latent_attention = true;
  config.q_lora_rank = fields.optional_size("q_lora_rank").value_or(0);
  config.kv_lora_rank = fields.size("kv_lora_rank");
  config.qk_head_dim = fields.size("qk_nope_head_dim");
  config.qk_pos_emb_head_dim = fields.size("qk_rope_head_dim");
  config.v_head_dim = fields.size("v_head_dim");
  const auto* mtp = fields.find("num_nextn_predict_layers");
  if (config.family == "deepseek_v3" && mtp != nullptr) {
    config.mtp_num_layers = distckpt::json_int(*mtp, "num_nextn_predict_layers", fields.source());
    require(config.mtp_num_layers >= 0 && config.mtp_num_layers <= kMaxLayers, ErrorKind::kCorrupt,
            "{}: num_nextn_predict_layers is {}, expected 0 to {}", fields.source(),
            config.mtp_num_layers, kMaxLayers);
  }
}

std::optional<BlockQuantization> quantization_of(const Fields& fields) {
  const auto* value = fields.find("quantization_config");
  if (value == nullptr) return std::nullopt;
  const Fields how(*value, fmt::format("{}: quantization_config", fields.source()));
  const auto method = how.text("quant_method", "");
  const auto format = how.text("fmt", "e4m3");
  const auto* block = how.find("weight_block_size");
  require(
      method == "fp8" && format == "e4m3" && block != nullptr, ErrorKind::kLayout,
      "{}: the weights are quantised by \"{}\" ({}{}); only fp8 (e4m3) with a weight_block_size "
      "is read",
      how.source(), method, format, block == nullptr ? ", no blocks" : "");
  require(block->is_array() && block->size() == 2, ErrorKind::kCorrupt,
          "{}: weight_block_size is {}, expected two sizes", how.source(), block->dump());
  BlockQuantization quantization;
  for (const auto& size : *block) {
    quantization.block.push_back(distckpt::json_int(size, "weight_block_size", how.source()));
    const auto last = quantization.block[quantization.block.rank() - 1];
    require(last >= 1 && last <= kMaxSize, ErrorKind::kCorrupt, "{}: weight_block_size is {}",
            how.source(), block->dump());
  }
  return quantization;
}

// "LlamaForTokenClassification": what the model ends in.
void parse_head(const Fields& fields, TransformerConfig& config) {
  const auto* architectures = fields.find("architectures");
  if (architectures == nullptr) return;
  require(architectures->is_array(), ErrorKind::kCorrupt, "{}: architectures is not a list",
          fields.source());
  for (const auto& entry : *architectures) {
    const auto name = distckpt::json_string(entry, "architectures", fields.source());
    if (name.ends_with("ForSequenceClassification")) config.head = Head::kSequenceClassification;
    if (name.ends_with("ForTokenClassification")) config.head = Head::kTokenClassification;
  }
  if (config.head == Head::kLanguageModel) return;
  const auto* labels = fields.find("id2label");
  require(labels == nullptr || labels->is_object(), ErrorKind::kCorrupt,
          "{}: id2label is not an object", fields.source());
  const auto named = labels == nullptr ? 2 : static_cast<std::int64_t>(labels->size());
  config.num_labels = fields.size("num_labels", named);
}

}  // namespace

TransformerConfig parse_hf_config(std::string_view text, std::string_view source) {
  const auto object = distckpt::parse_json(text, source);
  const Fields fields(object, std::string(source));
  TransformerConfig config;
  config.family = distckpt::json_string(fields.required("model_type"), "model_type", source);
  with_context([&] { return fmt::format("reading {}", source); },
               [&] { find_family(config.family); });
  quantization_of(fields);
  const auto activation = fields.text("hidden_act", "silu");
  require(activation == "silu", ErrorKind::kLayout,
          "{}: hidden_act is \"{}\", only \"silu\" is handled", source, activation);

  config.num_layers = fields.size("num_hidden_layers", std::nullopt, kMaxLayers);
  config.hidden_size = fields.size("hidden_size");
  config.ffn_hidden_size = fields.size("intermediate_size");
  config.num_attention_heads = fields.size("num_attention_heads", std::nullopt, kMaxHeads);
  config.num_query_groups =
      fields.size("num_key_value_heads", config.num_attention_heads, kMaxHeads);
  require(config.num_attention_heads % config.num_query_groups == 0, ErrorKind::kCorrupt,
          "{}: num_attention_heads {} is no multiple of num_key_value_heads {}", source,
          config.num_attention_heads, config.num_query_groups);
  const auto* head_dim = fields.find("head_dim");
  require(head_dim != nullptr || config.hidden_size % config.num_attention_heads == 0,
          ErrorKind::kCorrupt,
          "{}: hidden_size {} is no multiple of {} heads, and there is no head_dim", source,
          config.hidden_size, config.num_attention_heads);
  config.kv_channels = fields.size("head_dim", config.hidden_size / config.num_attention_heads);
  config.vocab_size = fields.size("vocab_size");
  config.max_position_embeddings = fields.size("max_position_embeddings", 2048);
  config.layernorm_epsilon = fields.optional_number("rms_norm_eps").value_or(1e-6);
  parse_rope(fields, config);

  const bool attention_bias = fields.flag("attention_bias", false);
  const bool mlp_bias = fields.flag("mlp_bias", false);
  require(!attention_bias || mlp_bias, ErrorKind::kLayout,
          "{}: attention_bias without mlp_bias has no counterpart in Megatron-Core", source);
  require(!mlp_bias || attention_bias, ErrorKind::kLayout,
          "{}: mlp_bias without attention_bias has no counterpart in Megatron-Core", source);
  config.add_bias_linear = attention_bias;
  const auto& family = config.family;
  config.add_qkv_bias =
      family == "qwen2" || (family == "qwen2_moe" && fields.flag("qkv_bias", true));
  config.qk_layernorm = family == "qwen3" || family == "qwen3_moe";
  if (family.starts_with("deepseek_")) parse_latent_attention(fields, config);
  config = with_experts(fields, config);
  parse_head(fields, config);
  config.untie_embeddings_and_output_weights = !fields.flag("tie_word_embeddings", false);
  // Qwen names a window that it only uses when told to.
  const bool windowed =
      family == "mistral" || family == "mixtral" || fields.flag("use_sliding_window", false);
  if (windowed) config.sliding_window = fields.optional_size("sliding_window");
  require_moderate(config, source);
  return config;
}

std::optional<BlockQuantization> parse_quantization(std::string_view text,
                                                    std::string_view source) {
  const auto object = distckpt::parse_json(text, source);
  return quantization_of(Fields(object, std::string(source)));
}

std::string without_quantization(std::string_view text,
                                 distckpt::DType dtype,
                                 std::string_view source) {
  auto object = distckpt::parse_ordered_json(text, source);
  object.erase("quantization_config");
  return with_dtype(object.dump(), dtype, source);
}

std::string with_classification_head(std::string_view text,
                                     const TransformerConfig& config,
                                     std::string_view source) {
  auto object = distckpt::parse_ordered_json(text, source);
  std::string architecture;  // of "qwen2_moe": Qwen2MoeForTokenClassification
  bool begins = true;
  for (const unsigned char letter : config.family) {
    if (letter != '_') architecture += static_cast<char>(begins ? std::toupper(letter) : letter);
    begins = letter == '_';
  }
  architecture += config.head == Head::kTokenClassification ? "ForTokenClassification"
                                                            : "ForSequenceClassification";
  auto id2label = nlohmann::ordered_json::object();
  auto label2id = nlohmann::ordered_json::object();
  for (std::int64_t label = 0; label < config.num_labels; ++label) {
    const auto called = fmt::format("LABEL_{}", label);
    id2label[std::to_string(label)] = called;
    label2id[called] = label;
  }
  object["architectures"] = nlohmann::ordered_json::array({architecture});
  object["id2label"] = std::move(id2label);
  object["label2id"] = std::move(label2id);
  object.erase("num_labels");
  return object.dump(2) + "\n";
}

std::string with_dtype(std::string_view text, distckpt::DType dtype, std::string_view source) {
  auto object = distckpt::parse_ordered_json(text, source);
  bool found = false;
  for (const auto* key : {"dtype", "torch_dtype"}) {
    if (!object.contains(key)) continue;
    object[key] = std::string(torch_name(dtype));
    found = true;
  }
  if (!found) object["dtype"] = std::string(torch_name(dtype));
  return object.dump(2) + "\n";
}

}  // namespace ferry::converter
