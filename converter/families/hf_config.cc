#include "converter/families/hf_config.h"

#include <algorithm>
#include <cctype>
#include <functional>
#include <optional>

#include "converter/families/config_fields.h"
#include "converter/families/config_limits.h"
#include "converter/families/families.h"
#include "converter/families/quantization.h"
#include "distckpt/base/error.h"
#include "distckpt/base/json.h"

namespace ferry::converter {
namespace {

using models::Head;
using models::RopeScaling;
using models::RopeType;
using models::TransformerConfig;
using nlohmann::json;

// The list of numbers `key`; empty where there is none.
std::vector<double> read_factors(const ConfigFields& fields, std::string_view key) {
  const auto* const list = fields.find(key);
  if (list == nullptr) return {};
  const auto is_number = [](const json& one) { return one.is_number(); };
  require(list->is_array() && std::ranges::all_of(*list, is_number), ErrorKind::kCorrupt,
          "{}: {} is not a list of numbers", fields.source(), key);
  return list->get<std::vector<double>>();
}

// `whole`: the object around `fields`; an original length that it says itself counts first
// (standardize_rope_params of modeling_rope_utils.py), and its max_position_embeddings, `length`,
// is the original one too where nothing else is said.
RopeScaling parse_rope_scaling(const ConfigFields& fields,
                               const ConfigFields& whole,
                               std::int64_t length,
                               const Family& family) {
  // "type" is the older spelling of "rope_type"; transformers 5 leaves it in place beside that.
  const auto name = fields.text("rope_type", fields.text("type", name_of(RopeType::kDefault)));
  if (name == "mrope") return {};  // turning by three positions is turning by one, of text
  const bool renamed =
      std::ranges::find(family.longrope_names, name) != family.longrope_names.end();
  const auto type =
      renamed ? std::optional(RopeType::kLongrope) : find_in(models::kRopeTypes, name);
  require(type.has_value(), ErrorKind::kLayout, "{}: rope_type is \"{}\", which is none of {}",
          fields.source(), name, names_in(models::kRopeTypes));
  const auto beta =
      family.scales_queries ? fields.optional_number("llama_4_scaling_beta") : std::nullopt;
  auto original = fields.optional_size("original_max_position_embeddings");
  if (*type == RopeType::kDefault) {
    if (!beta) return {};
    return {.original_max_position_embeddings = original, .llama_4_scaling_beta = beta};
  }
  const bool of_lengths = *type == RopeType::kYarn || *type == RopeType::kLongrope;
  if (of_lengths || *type == RopeType::kLlama3) {
    const auto outer = family.rope_of_layers
                           ? std::nullopt
                           : whole.optional_size("original_max_position_embeddings");
    if (outer) original = outer;
    if (!original) original = length;
  }
  const double longer =
      of_lengths ? static_cast<double>(length) / static_cast<double>(*original) : 1.0;
  return {.type = *type,
          .factor = fields.optional_number("factor").value_or(longer),
          .low_freq_factor = fields.optional_number("low_freq_factor"),
          .high_freq_factor = fields.optional_number("high_freq_factor"),
          .attention_factor = fields.optional_number("attention_factor"),
          .beta_fast = fields.optional_number("beta_fast"),
          .beta_slow = fields.optional_number("beta_slow"),
          .mscale = fields.optional_number("mscale"),
          .mscale_all_dim = fields.optional_number("mscale_all_dim"),
          .original_max_position_embeddings = original,
          .truncate = fields.find("truncate") == nullptr
                          ? std::nullopt
                          : std::optional(fields.flag("truncate", true)),
          .short_factor = read_factors(fields, "short_factor"),
          .long_factor = read_factors(fields, "long_factor"),
          .llama_4_scaling_beta = beta};
}

constexpr std::string_view kFullAttention = "full_attention";

// True if rope_parameters hold an object for each kind of layer, or for one of them.
bool differs_by_layer(const json& rope) {
  return rope.contains(kFullAttention) || rope.contains(kLocalAttention);
}

// transformers 5 writes rope_parameters, older ones rope_theta and rope_scaling; a file may hold
// both.
void parse_rope(const ConfigFields& fields, const Family& family, TransformerConfig& config) {
  std::optional<double> theta = fields.optional_number("rope_theta");
  std::optional<double> percent = fields.optional_number("partial_rotary_factor");
  std::optional<RopeScaling> scaling;
  for (const auto* key : {"rope_parameters", "rope_scaling"}) {
    const auto* value = fields.find(key);
    if (value == nullptr) continue;
    if (family.rope_of_layers && differs_by_layer(*value)) {
      const auto full = value->find(kFullAttention);
      if (full == value->end() || full->is_null()) continue;  // they turn as if nothing were said
      value = &*full;
    }
    const ConfigFields rope(*value, fmt::format("{}: {}", fields.source(), key));
    for (const auto& [name, inner] : value->items()) {
      require(!inner.is_object(), ErrorKind::kLayout,
              "{}: {} differs by kind of layer, which is not handled", fields.source(), key);
    }
    const auto found = parse_rope_scaling(rope, fields, config.max_position_embeddings, family);
    require(!scaling || *scaling == found, ErrorKind::kCorrupt,
            "{}: rope_parameters and rope_scaling differ", fields.source());
    scaling = found;
    const auto inner_theta = rope.optional_number("rope_theta");
    require(!theta || !inner_theta || *theta == *inner_theta, ErrorKind::kCorrupt,
            "{}: rope_theta is {}, but {} says {}", fields.source(), theta.value_or(0), key,
            inner_theta.value_or(0));
    if (inner_theta) theta = inner_theta;
    if (const auto inner = rope.optional_number("partial_rotary_factor")) percent = inner;
  }
  config.rotary_base = theta.value_or(family.rotary_base);
  config.rope_scaling = scaling.value_or(RopeScaling{});
  const bool heeds_part = family.turns_in_part || family.rotary_percent != 1 ||
                          config.rope_scaling.type != RopeType::kDefault;
  config.rotary_percent = heeds_part ? percent.value_or(family.rotary_percent) : 1.0;
  require(
      config.multi_latent_attention || (config.rotary_percent > 0 && config.rotary_percent <= 1 &&
                                        config.rotary_dim() % 2 == 0 && config.rotary_dim() > 0),
      ErrorKind::kCorrupt, "{}: partial_rotary_factor is {}, of {} channels", fields.source(),
      config.rotary_percent, config.kv_channels);
}

// "LlamaForTokenClassification": what the model ends in.
void parse_head(const ConfigFields& fields, TransformerConfig& config) {
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

// A model whose layers are all dense has no experts, whatever config.json says of them.
void drop_experts(TransformerConfig& config) {
  const TransformerConfig dense;
  config.num_moe_experts = dense.num_moe_experts;
  config.moe_layer_freq = dense.moe_layer_freq;
  config.moe_ffn_hidden_size = dense.moe_ffn_hidden_size;
  config.moe_shared_expert_intermediate_size = dense.moe_shared_expert_intermediate_size;
  config.moe_shared_expert_gate = dense.moe_shared_expert_gate;
  config.moe_router_topk = dense.moe_router_topk;
  config.moe_router_score_function = dense.moe_router_score_function;
  config.moe_router_pre_softmax = dense.moe_router_pre_softmax;
  config.moe_router_enable_expert_bias = dense.moe_router_enable_expert_bias;
  config.moe_router_num_groups = dense.moe_router_num_groups;
  config.moe_router_group_topk = dense.moe_router_group_topk;
  config.moe_router_topk_scaling_factor = dense.moe_router_topk_scaling_factor;
}

// Groups of experts are chosen by the best of each, or, of sigmoids, by the best two.
void require_groups(const TransformerConfig& config, std::string_view source) {
  const auto groups = config.moe_router_num_groups;
  if (groups == 0) return;
  const auto least = config.moe_router_score_function == models::ScoreFunction::kSoftmax ? 1 : 2;
  require(config.num_moe_experts % groups == 0 && config.num_moe_experts >= least * groups &&
              config.moe_router_group_topk <= groups,
          ErrorKind::kLayout,
          "{}: n_group is {} and topk_group {}, which {} experts have no such groups for", source,
          groups, config.moe_router_group_topk, config.num_moe_experts);
}

// The family, and the member that describes the language model; empty if all of the file does.
struct Description {
  const Family* family = nullptr;
  std::string member{};
};

Description find_description(const ConfigFields& all) {
  const auto type = distckpt::json_string(all.required("model_type"), "model_type", all.source());
  const auto* const family = &family_of(type, all.find("architectures"));
  const auto& key = family->config_key;
  const bool nested = !key.empty() && all.find(key) != nullptr;
  return {.family = family, .member = nested ? std::string(key) : ""};
}

// The family in whose words the language model is described.
const Family& worded_as(const Family& family, const json& described) {
  if (family.text_families.empty() || !described.is_object()) return family;
  const auto type = described.find("model_type");
  const bool named = type != described.end() && type->is_string() &&
                     std::ranges::find(family.text_families, type->get<std::string>()) !=
                         family.text_families.end();
  return named ? find_family(type->get<std::string>()) : family;
}

// Adds what the class of the language model takes where nothing is said.
void add_defaults(const Family& family, json& described) {
  if (!described.is_object()) return;
  if (!family.defaults.empty()) {
    const auto defaults = distckpt::parse_json(family.defaults, family.model_type);
    for (const auto& [key, value] : defaults.items()) described.emplace(key, value);
  }
  const auto lacks = [&](const char* key) {
    const auto found = described.find(key);
    return found == described.end() || found->is_null();
  };
  if (family.default_rope.empty() || !lacks("rope_parameters") || !lacks("rope_scaling")) return;
  described["rope_parameters"] = distckpt::parse_json(family.default_rope, family.model_type);
  described.erase("rope_theta");
}

std::int64_t read_prediction_layers(const ConfigFields& fields, const PredictionCount& count) {
  if (!count.flag.empty() && !fields.flag(count.flag, true)) return 0;
  for (const auto key : count.keys) {
    if (fields.find(key) != nullptr) return fields.count(key, count.unsaid, count.limit);
  }
  return count.unsaid;
}

// The sizes that reports name; 0 where config.json says none.
void read_sizes(const ConfigFields& fields, TransformerConfig& config) {
  config.num_layers = fields.size("num_hidden_layers", std::nullopt, kMaxLayers);
  config.hidden_size = fields.size("hidden_size");
  config.num_attention_heads = fields.size("num_attention_heads", std::nullopt, kMaxHeads);
  config.num_query_groups =
      fields.size("num_key_value_heads", config.num_attention_heads, kMaxHeads);
  config.vocab_size = fields.size("vocab_size");
  config.ffn_hidden_size = fields.count("intermediate_size", 0, kMaxSize);
  config.kv_channels = fields.count("head_dim", 0, kMaxSize);
  config.max_position_embeddings = fields.count("max_position_embeddings", 0, kMaxSize);
  config.num_moe_experts = fields.count("n_routed_experts", 0, kMaxExperts);
  config.moe_ffn_hidden_size = fields.count("moe_intermediate_size", 0, kMaxSize);
  config.moe_shared_expert_intermediate_size =
      fields.count("n_shared_experts", 0, kMaxExperts) * config.moe_ffn_hidden_size;
  if (config.num_moe_experts > 0)
    config.moe_layer_freq.assign(static_cast<std::size_t>(config.num_layers), true);
  config.untie_embeddings_and_output_weights = !fields.flag("tie_word_embeddings", false);
}

// The same of a model of which nothing is known, whose keys may mean anything.
void read_told_sizes(const json& described, TransformerConfig& config) {
  const auto told = [&](const char* key) {
    const auto found = described.find(key);
    return found != described.end() && found->is_number_unsigned() ? found->get<std::int64_t>() : 0;
  };
  config.num_layers = told("num_hidden_layers");
  config.hidden_size = told("hidden_size");
  config.num_attention_heads = told("num_attention_heads");
  config.vocab_size = told("vocab_size");
}

}  // namespace

TransformerConfig parse_hf_config(std::string_view text, std::string_view source) {
  const auto object = distckpt::parse_python_json(text, source);
  const ConfigFields all(object, std::string(source));
  TransformerConfig config;
  const auto [family, member] = find_description(all);
  set_family(config, *family);
  parse_quantization(text, source);
  auto described = member.empty() ? object : all.required(member);
  const auto& words = worded_as(*family, described);
  add_defaults(words, described);
  const ConfigFields fields(
      described, member.empty() ? std::string(source) : fmt::format("{}: {}", source, member));
  if (family->model_type.empty()) {
    config.family = all.text("model_type", "");
    read_told_sizes(described, config);
    return config;
  }
  if (family->passes_through) {
    read_sizes(fields, config);
    return config;
  }
  for (const auto* key : {"hidden_act", "hidden_activation", "mlp_hidden_act"}) {
    const auto handled = name_of(family->activation);
    const auto activation = fields.text(key, handled);
    require(activation == handled, ErrorKind::kLayout, "{}: {} is \"{}\", only \"{}\" is handled",
            source, key, activation, handled);
  }
  config.activation = family->activation;

  // A list of layers says how many there are.
  const auto* kinds = fields.find("layers_block_type");
  config.num_layers = fields.size(
      "num_hidden_layers",
      kinds != nullptr ? std::optional(static_cast<std::int64_t>(kinds->size())) : std::nullopt,
      kMaxLayers);
  config.hidden_size = fields.size("hidden_size");
  // A model of experts alone may name none; this is Megatron-Core's default then.
  config.ffn_hidden_size = fields.find("moe_intermediate_size") != nullptr
                               ? fields.size("intermediate_size", 4 * config.hidden_size)
                               : fields.size("intermediate_size");
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
  parse_rope(fields, words, config);

  config.untie_embeddings_and_output_weights = !all.flag("tie_word_embeddings", family->tied);
  if (!family->names->prediction.empty())
    config.mtp_num_layers = read_prediction_layers(fields, family->prediction);
  words.configure(fields, config);
  if (family->configure_vision != nullptr) family->configure_vision(all, config);
  if (std::ranges::none_of(config.moe_layer_freq, std::identity())) drop_experts(config);
  require_groups(config, source);
  parse_head(all, config);
  require_moderate(config, source);
  return config;
}

namespace {

// "Qwen3VL" of Qwen3VLForConditionalGeneration; without a class "Qwen2Moe" of the family qwen2_moe.
std::string model_class(const nlohmann::ordered_json& object, std::string_view family) {
  const auto found = object.find("architectures");
  if (found != object.end() && found->is_array() && !found->empty() && found->front().is_string()) {
    const auto name = found->front().get<std::string>();
    const auto ending = name.rfind("For");
    if (ending != std::string::npos && ending > 0) return name.substr(0, ending);
  }
  std::string name;
  bool begins = true;
  for (const char letter : family) {
    const auto code = static_cast<unsigned char>(letter);
    if (letter != '_') name += begins ? static_cast<char>(std::toupper(code)) : letter;
    begins = letter == '_';
  }
  return name;
}

const char* class_ending(Head head) {
  return head == Head::kTokenClassification ? "ForTokenClassification"
                                            : "ForSequenceClassification";
}

}  // namespace

std::int64_t named_prediction_layers(std::string_view text, std::string_view source) {
  const auto object = distckpt::parse_python_json(text, source);
  const ConfigFields all(object, std::string(source));
  const auto [family, member] = find_description(all);
  if (family->passes_through) return 0;
  return read_prediction_layers(
      ConfigFields(member.empty() ? object : all.required(member), std::string(source)),
      family->prediction);
}

std::string without_prediction_layers(std::string_view text, std::string_view source) {
  auto object = distckpt::parse_ordered_python_json(text, source);
  const auto unordered = distckpt::parse_python_json(text, source);
  const auto [family, member] = find_description(ConfigFields(unordered, std::string(source)));
  const auto& keys = family->prediction.keys;
  auto& described = member.empty() ? object : object[member];
  const auto is_there = [&](std::string_view key) { return described.contains(key); };
  if (!keys.empty() && std::ranges::none_of(keys, is_there))
    described[std::string(keys.front())] = 0;
  for (const auto key : keys) {
    if (is_there(key)) described[std::string(key)] = 0;
  }
  const auto flag = family->prediction.flag;
  if (!flag.empty() && is_there(flag)) described[std::string(flag)] = false;
  return distckpt::python_json(object, 2) + "\n";
}

std::string with_classification_head(std::string_view text,
                                     const TransformerConfig& config,
                                     std::string_view source) {
  auto object = distckpt::parse_ordered_python_json(text, source);
  const auto architecture = model_class(object, config.family) + class_ending(config.head);
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
  return distckpt::python_json(object, 2) + "\n";
}

std::optional<std::string> class_that_transformers_lacks(const TransformerConfig& config,
                                                         std::string_view text,
                                                         std::string_view source) {
  const auto* const family = known_family(config.family);
  const auto classes = family == nullptr ? HeadClasses::kNone : family->head_classes;
  const bool has_class = config.head == Head::kTokenClassification
                             ? classes == HeadClasses::kOfSequencesAndTokens
                             : classes != HeadClasses::kNone;
  if (config.head == Head::kLanguageModel || has_class) return std::nullopt;
  const auto object = distckpt::parse_ordered_python_json(text, source);
  return model_class(object, config.family) + class_ending(config.head);
}

bool says_whether_tied(std::string_view text, std::string_view source) {
  const auto object = distckpt::parse_python_json(text, source);
  return ConfigFields(object, std::string(source)).find("tie_word_embeddings") != nullptr;
}

std::string with_untied_ends(std::string_view text, std::string_view source) {
  auto object = distckpt::parse_ordered_python_json(text, source);
  object["tie_word_embeddings"] = false;
  return distckpt::python_json(object, 2) + "\n";
}

std::string with_dtype(std::string_view text, distckpt::DType dtype, std::string_view source) {
  auto object = distckpt::parse_ordered_python_json(text, source);
  bool found = false;
  for (const auto* key : {"dtype", "torch_dtype"}) {
    if (!object.contains(key)) continue;
    object[key] = std::string(torch_name(dtype));
    found = true;
  }
  if (!found) object["dtype"] = std::string(torch_name(dtype));
  return distckpt::python_json(object, 2) + "\n";
}

}  // namespace ferry::converter
