#include "converter/families/megatron_args.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <functional>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "converter/families/config_limits.h"
#include "converter/families/families.h"
#include "converter/families/megatron_fields.h"
#include "distckpt/base/error.h"
#include "distckpt/base/named.h"
#include "models/spec/yarn.h"

namespace ferry::converter {
namespace {

using distckpt::PickleKind;
using distckpt::PickleValue;
using models::ParallelConfig;
using models::TransformerConfig;
using nlohmann::ordered_json;

constexpr std::string_view kArguments = "the checkpoint's arguments";

// Reads fields of a Namespace; an absent one and None are "not given".
class ArgumentReader {
 public:
  explicit ArgumentReader(PickleValue args) : args_(args) {}

  std::optional<PickleValue> find(std::string_view key) const {
    auto value = args_.find(key);
    return value && value->is_none() ? std::nullopt : value;
  }
  // 1 to `limit`.
  std::int64_t size(std::string_view key, std::int64_t limit = kMaxSize) const {
    require(find(key).has_value(), ErrorKind::kCorrupt, "{} lack {}", kArguments, key);
    const auto size = integer(key, 0, limit);
    require(size > 0, ErrorKind::kCorrupt, "{} say that {} is 0", kArguments, key);
    return size;
  }
  // 0 to `limit`.
  std::int64_t integer(std::string_view key,
                       std::int64_t otherwise,
                       std::int64_t limit = kMaxSize) const {
    const auto value = find(key);
    if (!value) return otherwise;
    const auto integer = value->as_int();
    require(integer >= 0 && integer <= limit, ErrorKind::kCorrupt,
            "{} say that {} is {}, expected at most {}", kArguments, key, integer, limit);
    return integer;
  }
  bool flag(std::string_view key, bool otherwise) const {
    const auto value = find(key);
    return value ? value->as_bool() : otherwise;
  }
  std::string text(std::string_view key, std::string_view otherwise) const {
    const auto value = find(key);
    return std::string(value ? value->as_string() : otherwise);
  }
  // The value that a table names.
  template <typename T, std::size_t kCount>
  T choice(std::string_view key, const std::array<Named<T>, kCount>& table, T otherwise) const {
    const auto name = text(key, name_in(table, otherwise));
    const auto found = find_in(table, name);
    require(found.has_value(), ErrorKind::kLayout, "{} say that {} is \"{}\", which is none of {}",
            kArguments, key, name, names_in(table));
    return *found;
  }
  double number(std::string_view key, double otherwise) const {
    const auto value = find(key);
    const auto number = value ? value->as_float() : otherwise;
    require(std::isfinite(number), ErrorKind::kCorrupt, "{} say that {} is {}", kArguments, key,
            number);
    return number;
  }
  void read(std::span<const AnyField> fields, TransformerConfig& config) const {
    each_field(fields, [&](const auto& field) { config.*field.member = value_of(field); });
  }

 private:
  std::int64_t value_of(const SizeField& field) const {
    return field.otherwise ? integer(field.argument, *field.otherwise, field.limit)
                           : size(field.argument, field.limit);
  }
  bool value_of(const FlagField& field) const { return flag(field.argument, *field.otherwise); }
  double value_of(const NumberField& field) const {
    return number(field.argument, *field.otherwise);
  }

  PickleValue args_;
};

// transformers' words for mscale and mscale_all_dim, which heeds them together alone.
void read_yarn_scale(const ArgumentReader& args, models::RopeScaling& scaling) {
  const double mscale = args.number("mscale", 1.0);
  const double all_dim = args.number("mscale_all_dim", 0.0);
  if (all_dim != 0) scaling.mscale_all_dim = all_dim;
  if (all_dim != 0 && mscale != 0) {
    scaling.mscale = mscale;
  } else if (mscale != 1) {
    scaling.attention_factor =
        models::yarn_mscale(scaling.factor, mscale) / models::yarn_mscale(scaling.factor, all_dim);
  }
}

// Megatron-Core's latent attention takes YaRN where rope_type is not said; a factor of 1 is none.
void read_latent_yarn(const ArgumentReader& args, TransformerConfig& config) {
  constexpr std::string_view kYarn = name_of(models::RopeType::kYarn);
  const auto type = args.text("rope_type", "");
  require(type.empty() || type == kYarn || type == "rope", ErrorKind::kLayout,
          "{} say that rope_type is \"{}\", which is none of rope, yarn", kArguments, type);
  const double factor = args.number("rotary_scaling_factor", type == kYarn ? 40.0 : 1.0);
  if (type == "rope" || (type.empty() && factor == 1)) return;
  config.rope_scaling = {
      .type = models::RopeType::kYarn,
      .factor = factor,
      .beta_fast = args.number("beta_fast", 32.0),
      .beta_slow = args.number("beta_slow", 1.0),
      .original_max_position_embeddings = args.integer("original_max_position_embeddings", 4096)};
  read_yarn_scale(args, config.rope_scaling);
}

void read_latent_attention(const ArgumentReader& args, TransformerConfig& config) {
  config.multi_latent_attention = true;
  config.qk_layernorm = false;  // here it names the norms of the low-rank paths
  read_latent_yarn(args, config);
  if (!args.find("kv_lora_rank")) return;  // older arguments leave the sizes away
  args.read(kLatentFields, config);
  if (args.text("experimental_attention_variant", "") == "dsa") args.read(kIndexerFields, config);
}

// A list with one entry for each layer, or a number n, of which `counts` says whether it counts a
// layer.
std::vector<bool> read_layers(const ArgumentReader& args,
                              std::string_view key,
                              std::int64_t num_layers,
                              bool (*counts)(std::int64_t layer, std::int64_t n)) {
  const auto freq = args.find(key);
  const bool list = freq && freq->kind() == distckpt::PickleKind::kList;
  const auto n = list ? 0 : args.size(key);
  require(!list || static_cast<std::int64_t>(freq->size()) == num_layers, ErrorKind::kCorrupt,
          "{} hold a {} of {} entries for {} layers", kArguments, key, list ? freq->size() : 0,
          num_layers);
  std::vector<bool> layers;
  for (std::int64_t i = 0; i < num_layers; ++i) {
    layers.push_back(list ? (*freq)[static_cast<std::size_t>(i)].as_int() != 0 : counts(i, n));
  }
  return layers;
}

bool is_nth(std::int64_t layer, std::int64_t n) {
  return (layer + 1) % n == 0;
}

// All layers but every n-th, or a list.
std::vector<bool> read_skip_freq(const ArgumentReader& args,
                                 std::string_view key,
                                 std::int64_t num_layers) {
  return read_layers(args, key, num_layers,
                     [](std::int64_t layer, std::int64_t n) { return !is_nth(layer, n); });
}

void read_linear_attention(const ArgumentReader& args, TransformerConfig& config) {
  if (args.text("experimental_attention_variant", "") != kGatedDeltaNet) return;
  config.linear_attention_freq = read_skip_freq(args, "linear_attention_freq", config.num_layers);
  args.read(kLinearAttentionFields, config);
}

// hybrid_layer_pattern: "M*ME|M-/*E", letters of layers, stages between "|", then those of each
// prediction layer behind a "/".
void read_hybrid_layers(const ArgumentReader& args, TransformerConfig& config) {
  auto pattern = args.text("hybrid_layer_pattern", args.text("hybrid_override_pattern", ""));
  if (pattern.empty()) return;
  std::erase(pattern, '|');
  const auto main = std::string_view(pattern).substr(0, pattern.find('/'));
  config.hybrid_layer_pattern = main;
  config.mtp_hybrid_override_pattern = args.text("mtp_hybrid_override_pattern", "");
  if (main.size() < pattern.size()) {
    auto rest = std::string_view(pattern).substr(main.size() + 1);
    config.mtp_hybrid_override_pattern = rest.substr(0, rest.find('/'));
  }
  for (const auto& letters : {config.hybrid_layer_pattern, config.mtp_hybrid_override_pattern}) {
    require(letters.find_first_not_of(models::kHybridLetters) == std::string::npos,
            ErrorKind::kLayout, "{} hold the hybrid_layer_pattern {}, of which {} are handled",
            kArguments, pattern, models::kHybridLetters);
  }
  config.num_layers = std::ssize(config.hybrid_layer_pattern);
  config.moe_layer_freq.clear();
  for (const char letter : config.hybrid_layer_pattern) {
    if (config.num_moe_experts > 0) config.moe_layer_freq.push_back(letter == 'E');
  }
  config.gated_linear_unit = args.flag("swiglu", false);
  if (args.flag("squared_relu", false)) config.activation = models::Activation::kSquaredRelu;
  args.read(kMambaFields, config);
  config.linear_conv_kernel_dim = kMambaKernel;
}

void read_experts(const ArgumentReader& args, TransformerConfig& config) {
  config.num_moe_experts = args.size("num_experts", kMaxExperts);
  config.moe_ffn_hidden_size = args.integer("moe_ffn_hidden_size", config.ffn_hidden_size);
  if (config.moe_ffn_hidden_size == 0) config.moe_ffn_hidden_size = config.ffn_hidden_size;
  config.moe_layer_freq.assign(static_cast<std::size_t>(config.num_layers), true);
  if (args.find("moe_layer_freq"))
    config.moe_layer_freq =
        read_layers(args, "moe_layer_freq", config.num_layers,
                    [](std::int64_t layer, std::int64_t n) { return layer % n == 0; });
  config.moe_router_topk = args.integer("moe_router_topk", 2);
  config.moe_router_score_function = args.choice(
      "moe_router_score_function", models::kScoreFunctions, models::ScoreFunction::kSoftmax);
  args.read(kRouterFields, config);
}

// The settings that Megatron-LM knows since it has GPT-OSS, into a configuration that has its
// layers and its window.
void read_sinks_and_yarn(const ArgumentReader& args, TransformerConfig& config) {
  const auto softmax = args.text("softmax_type", "vanilla");
  require(softmax == "vanilla" || softmax == "learnable", ErrorKind::kLayout,
          "the checkpoint was trained with a softmax_type of {}, which no known family has",
          softmax);
  config.softmax_offset = softmax == "learnable";
  if (args.flag("quick_geglu", false)) config.activation = models::Activation::kQuickGeglu;
  config.glu_linear_offset = args.number("glu_linear_offset", 0.0);
  if (args.find("activation_func_clamp_value"))
    config.activation_func_clamp_value = args.number("activation_func_clamp_value", 0.0);
  if (args.find("window_attn_skip_freq") && config.sliding_window)
    config.window_attn_skip_freq = read_skip_freq(args, "window_attn_skip_freq", config.num_layers);
  if (config.multi_latent_attention || args.text("position_embedding_type", "rope") != "yarn")
    return;
  config.rope_scaling = {.type = models::RopeType::kYarn,
                         .factor = args.number("rotary_scaling_factor", 1.0),
                         .beta_fast = args.number("yarn_beta_fast", 32.0),
                         .beta_slow = args.number("yarn_beta_slow", 1.0),
                         .original_max_position_embeddings =
                             args.integer("yarn_original_max_position_embeddings", 4096),
                         .truncate = args.flag("yarn_correction_range_round_to_int", true)};
  read_yarn_scale(args, config.rope_scaling);
}

// Nothing for a value that JSON lacks.
std::optional<ordered_json> plain_json(PickleValue value) {
  switch (value.kind()) {
    case PickleKind::kNone:
      return nullptr;
    case PickleKind::kBool:
      return value.as_bool();
    case PickleKind::kInt:
      return value.as_int();
    case PickleKind::kFloat:
      return value.as_float();
    case PickleKind::kString:
      return value.as_string();
    case PickleKind::kList:
    case PickleKind::kTuple: {
      auto listed = ordered_json::array();
      for (const auto element : value.elements()) {
        const auto one = plain_json(element);
        if (!one) return std::nullopt;
        listed.push_back(*one);
      }
      return listed;
    }
    default:
      return std::nullopt;
  }
}

}  // namespace

ordered_json plain_args(PickleValue args) {
  constexpr std::size_t kMaxValues = 1'000'000;
  constexpr int kMaxDepth = 20;
  args.require_tree(kMaxValues, kMaxDepth);
  auto plain = ordered_json::object();
  for (const auto& [name, value] : args.object_state().items()) {
    if (const auto one = plain_json(value)) plain[std::string(name.as_string())] = *one;
  }
  return plain;
}

std::optional<PickleValue> find_args(PickleValue common_state) {
  if (common_state.is_object(kArgumentsNamespace)) return common_state;
  const auto args = common_state.find("args");
  if (!args || !args->is_object(kArgumentsNamespace)) return std::nullopt;
  return args;
}

std::optional<ParallelConfig> read_parallel_args(PickleValue common_state) {
  const auto found = find_args(common_state);
  if (!found) return std::nullopt;
  const ArgumentReader args(found->object_state());
  const auto size = [&](std::string_view key, int otherwise) {
    return args.find(key) ? static_cast<int>(args.size(key, kMaxSize - 1)) : otherwise;
  };
  const auto optional_size = [&](std::string_view key) -> std::optional<int> {
    return args.find(key) ? std::optional(size(key, 1)) : std::nullopt;
  };
  ParallelConfig parallel;
  parallel.tensor_model_parallel_size = size("tensor_model_parallel_size", 1);
  parallel.pipeline_model_parallel_size = size("pipeline_model_parallel_size", 1);
  parallel.context_parallel_size = size("context_parallel_size", 1);
  parallel.expert_model_parallel_size = size("expert_model_parallel_size", 1);
  parallel.expert_tensor_parallel_size = optional_size("expert_tensor_parallel_size");
  parallel.virtual_pipeline_model_parallel_size =
      optional_size("virtual_pipeline_model_parallel_size");
  parallel.num_layers_in_first_pipeline_stage = optional_size("decoder_first_pipeline_num_layers");
  parallel.num_layers_in_last_pipeline_stage = optional_size("decoder_last_pipeline_num_layers");
  parallel.account_for_embedding_in_pipeline_split =
      args.flag("account_for_embedding_in_pipeline_split", false);
  parallel.account_for_loss_in_pipeline_split =
      args.flag("account_for_loss_in_pipeline_split", false);
  parallel.make_vocab_size_divisible_by = size("make_vocab_size_divisible_by", 128);
  // A text, or an object made of it.
  auto layout = args.find("pipeline_model_parallel_layout");
  if (layout && layout->kind() == distckpt::PickleKind::kObject)
    layout = layout->find("input_data");
  if (layout && layout->kind() == distckpt::PickleKind::kString) {
    parallel.pipeline_model_parallel_layout = layout->as_string();
    parallel.virtual_pipeline_model_parallel_size.reset();  // follows from it
  }
  return parallel;
}

std::optional<TransformerConfig> read_args(PickleValue common_state) {
  const auto found = find_args(common_state);
  if (!found) return std::nullopt;
  const ArgumentReader args(found->object_state());
  if (!args.find("num_layers")) return std::nullopt;
  TransformerConfig config;
  args.read(kModelFields, config);
  config.num_query_groups = args.flag("group_query_attention", false)
                                ? args.size("num_query_groups", kMaxHeads)
                                : config.num_attention_heads;
  require(config.num_attention_heads % config.num_query_groups == 0, ErrorKind::kCorrupt,
          "{} say {} attention heads in {} query groups", kArguments, config.num_attention_heads,
          config.num_query_groups);
  if (args.find("kv_channels")) {
    config.kv_channels = args.size("kv_channels");
  } else {
    require(config.hidden_size % config.num_attention_heads == 0, ErrorKind::kCorrupt,
            "{} say a hidden_size of {}, no multiple of {} heads, and no kv_channels", kArguments,
            config.hidden_size, config.num_attention_heads);
    config.kv_channels = config.hidden_size / config.num_attention_heads;
  }
  config.vocab_size = args.integer("vocab_size", 0);
  config.max_position_embeddings = args.integer("max_position_embeddings", 0);
  config.layernorm_epsilon = args.number("norm_epsilon", 1e-5);
  config.rotary_base = args.number("rotary_base", 10000.0);
  args.read(kRotaryFields, config);
  args.read(kBiasFields, config);
  args.read(kHeadFields, config);
  config.qk_layernorm = args.flag("qk_layernorm", false);
  if (args.flag("multi_latent_attention", false)) read_latent_attention(args, config);
  if (args.find("num_experts")) read_experts(args, config);
  read_linear_attention(args, config);
  read_hybrid_layers(args, config);
  config.mtp_num_layers = args.integer("mtp_num_layers", 0, kMaxLayers);
  require_moderate(config, kArguments);
  if (args.flag("use_rope_scaling", false)) {  // the only kind that Megatron-LM has: Llama 3's
    config.rope_scaling.type = models::RopeType::kLlama3;
    config.rope_scaling.factor = args.number("rope_scaling_factor", 8.0);
  }
  if (args.find("rotary_seq_len_interpolation_factor")) {
    config.rope_scaling.type = models::RopeType::kLinear;
    config.rope_scaling.factor = args.number("rotary_seq_len_interpolation_factor", 1.0);
  }
  if (const auto window = args.find("window_size")) {
    const auto left = (*window)[0].as_int();  // -1: no limit
    require(left >= -1 && left < kMaxSize, ErrorKind::kCorrupt, "{} say that window_size is {}",
            kArguments, window->describe());
    if (left >= 0) config.sliding_window = left + 1;
  }
  if (args.find("no_rope_freq")) {
    auto without = read_layers(args, "no_rope_freq", config.num_layers, is_nth);
    if (std::ranges::any_of(without, std::identity())) config.no_rope_freq = std::move(without);
  }
  read_sinks_and_yarn(args, config);
  set_family(config, infer_family(config));
  return config;
}

void require_same_model(const TransformerConfig& args,
                        const TransformerConfig& config,
                        std::string_view args_source,
                        std::string_view config_source) {
  const auto same = [&](const auto& a, const auto& b, std::string_view field) {
    if (a == b) return;
    throw Error(
        ErrorKind::kCorrupt,
        fmt::format("{}: {} is {}, but {} says {}", args_source, field, a, config_source, b),
        "the configuration is not that of this checkpoint");
  };
  const auto same_fields = [&](std::span<const AnyField> fields) {
    each_field(fields, [&](const auto& field) {
      const bool set = args.*field.member != field.otherwise;
      if (field.compared == Compared::kAlways || (field.compared == Compared::kIfSet && set))
        same(args.*field.member, config.*field.member, field.argument);
    });
  };
  same_fields(kModelFields);
  same(args.num_query_groups, config.num_query_groups, "num_query_groups");
  same(args.kv_channels, config.kv_channels, "kv_channels");
  same_fields(kRotaryFields);
  same_fields(kBiasFields);
  same_fields(kHeadFields);
  same(args.qk_layernorm, config.qk_layernorm, "qk_layernorm");
  same(args.softmax_offset, config.softmax_offset, "softmax_type is learnable");
  same(args.num_moe_experts, config.num_moe_experts, "num_experts");
  same(args.moe_ffn_hidden_size, config.moe_ffn_hidden_size, "moe_ffn_hidden_size");
  if (args.num_moe_experts > 0) {
    same(args.moe_router_topk, config.moe_router_topk, "moe_router_topk");
    same_fields(kRouterFields);
  }
  if (args.sliding_window)
    same(*args.sliding_window, config.sliding_window.value_or(0), "sliding_window");
  if (args.no_rope_freq != config.no_rope_freq)
    fail(ErrorKind::kCorrupt, "{}: no_rope_freq is not as {} says", args_source, config_source);
  if (args.moe_layer_freq != config.moe_layer_freq)
    fail(ErrorKind::kCorrupt, "{}: moe_layer_freq is not as {} says", args_source, config_source);
  if (args.linear_attention_freq != config.linear_attention_freq)
    fail(ErrorKind::kCorrupt, "{}: linear_attention_freq is not as {} says", args_source,
         config_source);
  same_fields(kLinearAttentionFields);
  same(args.hybrid_layer_pattern, config.hybrid_layer_pattern, "hybrid_layer_pattern");
  same_fields(kMambaFields);
  same(args.multi_latent_attention, config.multi_latent_attention, "multi_latent_attention");
  if (args.kv_lora_rank > 0) same_fields(kLatentFields);
  if (args.is_sparse()) same_fields(kIndexerFields);
  same(args.layernorm_epsilon, config.layernorm_epsilon, "norm_epsilon");
  // Megatron-LM's own argument is an integer.
  const bool cut = args.rotary_base == std::trunc(args.rotary_base);
  same(args.rotary_base, cut ? std::trunc(config.rotary_base) : config.rotary_base, "rotary_base");
}

}  // namespace ferry::converter
