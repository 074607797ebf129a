#include "converter/write/run_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <span>
#include <vector>

#include "converter/families/families.h"
#include "converter/families/megatron_args.h"
#include "converter/families/megatron_fields.h"
#include "distckpt/base/error.h"
#include "distckpt/base/json.h"
#include "distckpt/formats/torch_dist.h"
#include "distckpt/storage/file_io.h"
#include "distckpt/storage/filenames.h"

namespace ferry::converter {
namespace fs = std::filesystem;
namespace {

using models::Activation;
using models::RopeType;
using nlohmann::ordered_json;

// A field of the provider, and the argument of Megatron-LM that it is.
struct Field {
  std::string_view name;
  std::string_view argument = name;
  bool if_set = false;  // left out where the argument is none
};

// Fields that are no member of TransformerConfig (megatron_fields.h).
constexpr auto kFields = std::to_array<Field>({
    {"bf16"},
    {"fp16"},
    {"num_query_groups"},
    {"kv_channels"},
    {"seq_length"},
    {"position_embedding_type"},
    {"rotary_base"},
    {"normalization"},
    {"qk_layernorm"},
    {"window_size", "window_size", true},
    {"window_attn_skip_freq"},
    {"softmax_type"},
    {"glu_linear_offset"},
    {"activation_func_clamp_value"},
    {"attention_dropout"},
    {"hidden_dropout"},
    {"vocab_size"},
    {"make_vocab_size_divisible_by"},
    {"mtp_num_layers"},
    {"experimental_attention_variant", "experimental_attention_variant", true},
    {"linear_attention_freq"},
    {"is_hybrid_model"},
    {"moe_layer_freq"},
    {"moe_ffn_hidden_size"},
    {"moe_grouped_gemm"},
    {"moe_router_topk"},
    {"moe_router_score_function"},
    {"moe_router_dtype", "moe_router_dtype", true},
    {"moe_router_load_balancing_type", "moe_router_load_balancing_type", true},
    {"moe_router_bias_update_rate", "moe_router_bias_update_rate", true},
    {"moe_aux_loss_coeff", "moe_aux_loss_coeff", true},
    {"mtp_loss_scaling_factor", "mtp_loss_scaling_factor", true},
    {"tensor_model_parallel_size"},
    {"pipeline_model_parallel_size"},
    {"virtual_pipeline_model_parallel_size"},
    {"context_parallel_size"},
    {"expert_model_parallel_size"},
    {"expert_tensor_parallel_size"},
    {"account_for_embedding_in_pipeline_split"},
    {"account_for_loss_in_pipeline_split"},
    {"pipeline_model_parallel_layout"},
    {"layernorm_epsilon", "norm_epsilon"},
    {"layernorm_zero_centered_gamma", "apply_layernorm_1p"},
    {"num_moe_experts", "num_experts"},
    {"rope_scaling", "use_rope_scaling"},
    {"seq_len_interpolation_factor", "rotary_seq_len_interpolation_factor"},
    {"num_layers_in_first_pipeline_stage", "decoder_first_pipeline_num_layers"},
    {"num_layers_in_last_pipeline_stage", "decoder_last_pipeline_num_layers"},
});
constexpr auto kOfLatent = std::to_array<Field>({
    {"multi_latent_attention"},
    {"rope_type"},
    {"rotary_scaling_factor"},
    {"mscale"},
    {"mscale_all_dim"},
    {"beta_fast"},
    {"beta_slow"},
    {"original_max_position_embeddings"},
});

void add_fields(std::span<const Field> fields, const ordered_json& args, ordered_json& model) {
  for (const auto& field : fields) {
    const auto at = args.find(field.argument);
    if (at != args.end() && !(field.if_set && at->is_null())) model[std::string(field.name)] = *at;
  }
}
void add_fields(std::span<const AnyField> fields, const ordered_json& args, ordered_json& model) {
  each_field(fields, [&](const auto& field) {
    const auto at = args.find(field.argument);
    if (at != args.end()) model[std::string(field.argument)] = *at;
  });
}

// A function or class by its name.
ordered_json named(const std::string& name) {
  return {{"_target_", name}, {"_call_", false}};
}

ordered_json activation_func(Activation activation) {
  switch (activation) {
    case Activation::kSilu:
      return named("torch.nn.functional.silu");
    case Activation::kGeluTanh:
      return named("megatron.core.activations.fast_gelu");
    case Activation::kQuickGeglu:
      return named("megatron.core.fusions.fused_bias_geglu.quick_gelu");
    case Activation::kSquaredRelu:
      return named("megatron.core.activations.squared_relu");
  }
  fail(ErrorKind::kBug, "an activation without a function");
}

bool has_plain_yarn(const models::TransformerConfig& config) {
  return config.rope_scaling.type == RopeType::kYarn && !config.multi_latent_attention;
}

// YaRN of attention that is not latent. A factor of the angles that follows from the scaling is
// left to megatron-core.
void add_yarn(const models::TransformerConfig& config, ordered_json& model) {
  const auto& scaling = config.rope_scaling;
  const bool has_mscale =
      scaling.mscale.value_or(0.0) != 0 && scaling.mscale_all_dim.value_or(0.0) != 0;
  model["position_embedding_type"] = "yarn";
  model["yarn_rotary_scaling_factor"] = scaling.factor;
  model["yarn_original_max_position_embeddings"] =
      scaling.original_max_position_embeddings.value_or(config.max_position_embeddings);
  model["yarn_beta_fast"] = scaling.beta_fast.value_or(32.0);
  model["yarn_beta_slow"] = scaling.beta_slow.value_or(1.0);
  model["yarn_mscale"] = has_mscale ? ordered_json(*scaling.mscale) : ordered_json();
  model["yarn_mscale_all_dim"] =
      has_mscale ? ordered_json(*scaling.mscale_all_dim) : ordered_json();
  model["yarn_correction_range_round_to_int"] = scaling.truncate.value_or(true);
}

// The model of a family, or null.
const BridgeModel* bridge_model(const models::TransformerConfig& config, MegatronLayout layout) {
  const auto* const family = known_family(config.family);
  if (family == nullptr) return nullptr;
  return layout == MegatronLayout::kMegatronBridge ? family->bridge_seeing : family->bridge;
}

// An object of transformers, made of an object of config.json.
ordered_json transformers_config(std::string_view type, ordered_json object) {
  return {{"_target_", fmt::format("transformers.models.{}.from_dict", type)},
          {"_call_", true},
          {"config_dict", std::move(object)}};
}

// Bridge makes what `_target_` names of an object, and expands `${...}` in texts: config.json,
// which anyone may have written, must have neither.
void require_plain(const ordered_json& value, std::string_view where) {
  if (value.is_string()) {
    require(value.get_ref<const std::string&>().find("${") == std::string::npos,
            ErrorKind::kCorrupt, "config.json: {} has the text {}", where, value.dump());
  } else if (value.is_structured()) {
    for (const auto& [name, one] : value.items()) {
      require(value.is_array() || !(name.starts_with('_') && name.ends_with('_')),
              ErrorKind::kCorrupt, "config.json: {} has the key {}", where,
              ordered_json(name).dump());
      require_plain(one, where);
    }
  }
}

// Adds the words of config.json on images: the tower, the tokens that stand for what it sees, and
// how positions turn.
void add_vision(const BridgeModel& bridge, const ordered_json& hf, ordered_json& model) {
  // transformers up to 4.4x has the text's words at the top.
  const auto& text = hf.contains("text_config") ? hf["text_config"] : hf;
  const auto vision = hf.value("vision_config", ordered_json::object());
  require(vision.is_object(), ErrorKind::kCorrupt, "config.json: vision_config is no object");
  require_plain(vision, "vision_config");
  model["vision_config"] = transformers_config(bridge.vision_config, vision);
  if (bridge.mrope) model["position_embedding_type"] = "mrope";
  const auto add = [&](const ordered_json& object, const char* key, const char* field) {
    const auto found = object.find(key);
    if (found != object.end() && found->is_number_integer()) model[field] = *found;
  };
  for (const auto* key : {"bos_token_id", "eos_token_id"}) add(text, key, key);
  for (const auto* key : {"vision_start_token_id", "vision_end_token_id", "vision_token_id",
                          "image_token_id", "video_token_id", "mm_tokens_per_image"})
    add(hf, key, key);
  add(hf, "boi_token_index", "vision_start_token_id");  // Gemma 3
  add(hf, "eoi_token_index", "vision_end_token_id");
  add(hf, "image_token_index", "image_token_id");
  for (const auto* key : {"rope_parameters", "rope_scaling"}) {
    const auto rope = text.find(key);
    if (rope == text.end() || !rope->is_object() || !rope->contains("mrope_section")) continue;
    model["mrope_section"] = (*rope)["mrope_section"];
    require_plain(model["mrope_section"], "mrope_section");
  }
}

// The setting of scaled positions that Megatron-Core has as a constant, or not at all, if the model
// has another one; empty if it has none.
std::string_view setting_without_field(const models::TransformerConfig& config) {
  const auto& scaling = config.rope_scaling;
  if (config.multi_latent_attention) {  // MLASelfAttention of multi_latent_attention.py
    if (scaling.type == RopeType::kYarn)
      return scaling.truncate.value_or(true) ? "" : "yarn with a range that is not rounded";
    return scaling.type == RopeType::kDefault ? "" : "another way than yarn of latent attention";
  }
  // _apply_scaling of rotary_pos_embedding.py
  const bool usual = scaling.low_freq_factor.value_or(1.0) == 1.0 &&
                     scaling.high_freq_factor.value_or(4.0) == 4.0 &&
                     scaling.original_max_position_embeddings.value_or(8192) == 8192;
  return scaling.type == RopeType::kLlama3 && !usual ? "llama3 with frequencies of its own" : "";
}

// Groups of experts count by their best two, of routers without a bias by the best one; in
// Megatron-Core by as many as a group gives to a token (group_limited_topk of moe_utils.py).
bool groups_count_otherwise(const models::TransformerConfig& config) {
  return config.moe_router_num_groups > 1 &&
         config.moe_router_topk / std::max<std::int64_t>(config.moe_router_group_topk, 1) !=
             (config.moe_router_enable_expert_bias ? 2 : 1);
}

// JSON is YAML, but for a number like 1e-05, which YAML takes for a word.
std::string yaml(const ordered_json& value) {
  std::vector<std::string> parts;
  if (value.is_object()) {
    for (const auto& [name, one] : value.items())
      parts.push_back(fmt::format("{}: {}", ordered_json(name).dump(), yaml(one)));
    return fmt::format("{{{}}}", fmt::join(parts, ", "));
  }
  if (value.is_array()) {
    for (const auto& one : value) parts.push_back(yaml(one));
    return fmt::format("[{}]", fmt::join(parts, ", "));
  }
  auto text = value.dump();
  if (value.is_number_float() && text.find('.') == std::string::npos) {
    if (const auto exponent = text.find('e'); exponent != std::string::npos)
      text.insert(exponent, ".0");
  }
  return text;
}

}  // namespace

std::optional<std::string> run_config_problem(const models::TransformerConfig& config,
                                              MegatronLayout layout) {
  const auto refusal = [&](std::string_view why) {
    return fmt::format("{}: {}", config.family, why);
  };
  const auto* const bridge = bridge_model(config, layout);
  const auto& scaling = config.rope_scaling;
  if (bridge == nullptr && bridge_model(config, MegatronLayout::kMegatronBridge) != nullptr)
    return refusal("Megatron-Bridge opens it in its own layout, --megatron-layout megatron-bridge");
  if (bridge == nullptr) return refusal(family_of(config.family).no_bridge);
  if (config.head != models::Head::kLanguageModel)
    return refusal("Megatron-Bridge has no such head");
  if (config.multi_latent_attention && config.q_lora_rank == 0)
    return refusal(
        "has no q_lora_rank: Megatron-Bridge's model then has a norm before q that this one "
        "lacks");
  if (scaling.type != RopeType::kDefault && scaling.type != RopeType::kLinear &&
      scaling.type != RopeType::kLlama3 && scaling.type != RopeType::kYarn &&
      scaling.type != bridge->rope_type)
    return refusal(fmt::format("scales positions by {}, for which Megatron-LM has no argument",
                               name_of(scaling.type)));
  if (has_plain_yarn(config) && scaling.attention_factor)
    return refusal(
        "scales positions by yarn with an attention_factor, for which Megatron-Bridge has no "
        "field");
  if (const auto setting = setting_without_field(config); !setting.empty())
    return refusal(
        fmt::format("scales positions by {}, for which Megatron-Bridge has no field", setting));
  if (groups_count_otherwise(config))
    return refusal(
        fmt::format("chooses {} experts of {} groups: Megatron-Bridge's model weighs a group by "
                    "other experts",
                    config.moe_router_topk, config.moe_router_group_topk));
  if (scaling.llama_4_scaling_beta)
    return refusal("scales queries by their positions, for which Megatron-Bridge has no field");
  if (bridge->problem != nullptr) {
    if (const auto why = bridge->problem(config); !why.empty()) return refusal(why);
  }
  return std::nullopt;
}

std::optional<std::string> run_config_problem(const Checkpoint& source, MegatronLayout layout) {
  const auto& family = source.map.config.family;
  if (layout == MegatronLayout::kSlime)
    return fmt::format("{}: Megatron-Bridge does not know slime's delta nets", family);
  if (layout == MegatronLayout::kMbridge || (source.hf && !source.hf->part.empty()))
    return fmt::format("{}: Megatron-Bridge opens whole language models", family);
  if (layout == MegatronLayout::kMegatronBridge && !source.hf)
    return fmt::format("{}: the images of a model are what its config.json says", family);
  return run_config_problem(source.map.config, layout);
}

MegatronLayout bridge_layout(const Checkpoint& source) {
  const bool seeing = !source.megatron_names && source.map.family->bridge_seeing != nullptr;
  return seeing ? MegatronLayout::kMegatronBridge : source.megatron_layout;
}

std::string run_config_text(distckpt::PickleValue namespace_of_args,
                            const models::TransformerConfig& config,
                            const std::string& hf_model_id,
                            std::string_view hf_config) {
  const auto args = plain_args(namespace_of_args);
  const auto is_set = [&](const char* name) { return args.value(name, ordered_json()) == true; };
  const bool latent = is_set("multi_latent_attention");
  static constexpr std::string_view kBridge = "a setting of Megatron-Bridge";
  const auto& bridge = *bridge_model(
      config, hf_config.empty() ? MegatronLayout::kLanguageModel : MegatronLayout::kMegatronBridge);
  auto model = distckpt::parse_ordered_json(bridge.settings, kBridge);
  const std::span<const AnyField> of_all[] = {kModelFields,           kRotaryFields,  kBiasFields,
                                              kLinearAttentionFields, kIndexerFields, kMambaFields,
                                              kRouterFields};
  for (const auto fields : of_all) add_fields(fields, args, model);
  add_fields(std::span<const Field>(kFields), args, model);
  if (latent) {
    add_fields(std::span<const AnyField>(kLatentFields), args, model);
    add_fields(std::span<const Field>(kOfLatent), args, model);
  }
  model["share_embeddings_and_output_weights"] = !is_set("untie_embeddings_and_output_weights");
  model["params_dtype"] = named(is_set("bf16")   ? "torch.bfloat16"
                                : is_set("fp16") ? "torch.float16"
                                                 : "torch.float32");
  if (is_set("use_rope_scaling")) {
    const auto factor = args.value("rope_scaling_factor", ordered_json());
    model["rope_scaling_factor"] =
        factor.is_null() ? ordered_json(8.0) : factor;  // Megatron-LM's default
  }
  model["gated_linear_unit"] = config.gated_linear_unit;
  model["activation_func"] = activation_func(config.activation);
  if (has_plain_yarn(config)) add_yarn(config, model);
  if (!model.value("num_moe_experts", ordered_json()).is_null())
    model["moe_token_dispatcher_type"] = "alltoall";
  if (!bridge.layer_spec.empty())
    model["transformer_layer_spec"] = distckpt::parse_ordered_json(bridge.layer_spec, kBridge);
  if (!bridge.vision_config.empty()) {
    add_vision(bridge, distckpt::parse_ordered_python_json(hf_config, "config.json"), model);
  }
  if (bridge.configure != nullptr) bridge.configure(config, model);
  if (!hf_model_id.empty()) model["hf_model_id"] = hf_model_id;
  const std::string_view usual =
      latent ? "mla_provider.MLAModelProvider" : "gpt_provider.GPTModelProvider";
  const bool experts = config.num_moe_experts > 0 && !bridge.experts_provider.empty();
  const auto provider = experts ? bridge.experts_provider : bridge.provider;
  auto text = fmt::format("model:\n  _target_: \"megatron.bridge.models.{}\"\n",
                          provider.empty() ? usual : provider);
  for (const auto& [name, value] : model.items())
    text += fmt::format("  {}: {}\n", name, yaml(value));
  return text;
}

std::string run_config_text(distckpt::PickleValue args,
                            const Checkpoint& source,
                            MegatronLayout layout,
                            const std::string& hf_model_id) {
  return run_config_text(
      args, source.map.config, hf_model_id,
      layout == MegatronLayout::kMegatronBridge ? source.hf->config_text() : std::string());
}

fs::path write_run_config(const Checkpoint& checkpoint, const std::string& hf_model_id) {
  const auto& folder = checkpoint.location.folder;
  const auto args =
      checkpoint.common ? find_args(distckpt::common_dict(*checkpoint.common)) : std::nullopt;
  require(checkpoint.location.format == Format::kTorchDist && args, ErrorKind::kUsage,
          "{}: is no torch_dist checkpoint with arguments of Megatron", folder.string());
  if (const auto problem = run_config_problem(checkpoint, checkpoint.megatron_layout))
    throw Error(ErrorKind::kUsage, *problem);
  const auto mode = fs::status(folder / distckpt::kTorchDistConfig).permissions();
  auto path = folder / kRunConfig;
  distckpt::replace_text(
      path, run_config_text(*args, checkpoint, checkpoint.megatron_layout, hf_model_id),
      static_cast<unsigned>(mode) & 0666U);
  return path;
}

}  // namespace ferry::converter
