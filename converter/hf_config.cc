#include "converter/hf_config.h"

#include <cmath>
#include <optional>
#include <vector>

#include "converter/families.h"
#include "distckpt/error.h"
#include "distckpt/json.h"

namespace ferry::converter {
namespace {

using distckpt::RopeScaling;
using distckpt::TransformerConfig;
using nlohmann::json;

constexpr std::int64_t kMaxSize = std::int64_t{1} << 31;
constexpr std::int64_t kMaxLayers = 1 << 16;

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

}  // namespace

TransformerConfig parse_hf_config(std::string_view text, std::string_view source) {
  const auto object = distckpt::parse_json(text, source);
  const Fields fields(object, std::string(source));
  TransformerConfig config;
  config.family = distckpt::json_string(fields.required("model_type"), "model_type", source);
  with_context([&] { return fmt::format("reading {}", source); },
               [&] { find_family(config.family); });
  require(fields.find("quantization_config") == nullptr, ErrorKind::kLayout,
          "{}: the checkpoint is quantized (quantization_config), which is not handled", source);
  const auto activation = fields.text("hidden_act", "silu");
  require(activation == "silu", ErrorKind::kLayout,
          "{}: hidden_act is \"{}\", only \"silu\" is handled", source, activation);

  config.num_layers = fields.size("num_hidden_layers", std::nullopt, kMaxLayers);
  config.hidden_size = fields.size("hidden_size");
  config.ffn_hidden_size = fields.size("intermediate_size");
  config.num_attention_heads = fields.size("num_attention_heads", std::nullopt, kMaxLayers);
  config.num_query_groups =
      fields.size("num_key_value_heads", config.num_attention_heads, kMaxLayers);
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
  config.add_qkv_bias = config.family == "qwen2";
  config.qk_layernorm = config.family == "qwen3";
  config.untie_embeddings_and_output_weights = !fields.flag("tie_word_embeddings", false);
  // Qwen names a window that it only uses when told to.
  const bool windowed = config.family == "mistral" || fields.flag("use_sliding_window", false);
  if (windowed) config.sliding_window = fields.optional_size("sliding_window");
  return config;
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
