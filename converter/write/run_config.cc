#include "converter/write/run_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <span>
#include <utility>
#include <vector>

#include "converter/families/megatron_args.h"
#include "distckpt/base/error.h"
#include "distckpt/formats/torch_dist.h"
#include "distckpt/storage/file_io.h"
#include "distckpt/storage/filenames.h"

namespace ferry::converter {
namespace fs = std::filesystem;
namespace {

using nlohmann::ordered_json;

// Modules that Megatron-Bridge makes the layers of.
enum class Layers { kPlain, kDecoderBlock, kOlmoe, kMinimaxM2 };

constexpr std::array<std::pair<std::string_view, Layers>, 12> kFamilies{{
    {"llama", Layers::kPlain},
    {"mistral", Layers::kPlain},
    {"qwen2", Layers::kPlain},
    {"qwen3", Layers::kPlain},
    {"qwen3_moe", Layers::kPlain},
    {"deepseek_v2", Layers::kDecoderBlock},
    {"deepseek_v3", Layers::kDecoderBlock},
    {"kimi_k2", Layers::kDecoderBlock},
    {"glm4_moe", Layers::kDecoderBlock},
    {"glm4_moe_lite", Layers::kDecoderBlock},
    {"olmoe", Layers::kOlmoe},
    {"minimax_m2", Layers::kMinimaxM2},
}};

// A field of the provider, and the argument of Megatron-LM that it is.
struct Field {
  std::string_view name;
  std::string_view argument = name;
  bool if_set = false;  // left out where the argument is none
};

constexpr auto kFields = std::to_array<Field>({
    {"bf16"},
    {"fp16"},
    {"num_layers"},
    {"hidden_size"},
    {"ffn_hidden_size"},
    {"num_attention_heads"},
    {"num_query_groups"},
    {"kv_channels"},
    {"seq_length"},
    {"position_embedding_type"},
    {"rotary_base"},
    {"rotary_percent"},
    {"rotary_interleaved"},
    {"add_bias_linear"},
    {"add_qkv_bias"},
    {"normalization"},
    {"qk_layernorm"},
    {"window_size", "window_size", true},
    {"attention_dropout"},
    {"hidden_dropout"},
    {"vocab_size"},
    {"make_vocab_size_divisible_by"},
    {"mtp_num_layers"},
    {"moe_layer_freq"},
    {"moe_ffn_hidden_size"},
    {"moe_grouped_gemm"},
    {"moe_router_topk"},
    {"moe_router_score_function"},
    {"moe_router_pre_softmax"},
    {"moe_router_enable_expert_bias"},
    {"moe_router_topk_scaling_factor"},
    {"moe_router_num_groups"},
    {"moe_router_group_topk"},
    {"moe_shared_expert_intermediate_size"},
    {"moe_shared_expert_gate"},
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
constexpr auto kLatentFields = std::to_array<Field>({
    {"multi_latent_attention"},
    {"q_lora_rank"},
    {"kv_lora_rank"},
    {"qk_head_dim"},
    {"qk_pos_emb_head_dim"},
    {"v_head_dim"},
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

// A function or class by its name.
ordered_json named(const std::string& name) {
  return {{"_target_", name}, {"_call_", false}};
}

ordered_json layer_spec(Layers layers) {
  const std::string models = "megatron.bridge.models.";
  switch (layers) {
    case Layers::kPlain:
      return nullptr;
    case Layers::kOlmoe:
      return named(models + "olmoe.olmoe_provider.olmoe_layer_spec");
    case Layers::kMinimaxM2:
      return named(models + "minimax_m2.minimax_m2_provider.minimax_m2_layer_spec");
    case Layers::kDecoderBlock:
      break;
  }
  return {{"_target_", "megatron.core.models.gpt.gpt_layer_specs.get_gpt_decoder_block_spec"},
          {"_partial_", true},
          {"_args_", ordered_json::array()},
          {"use_transformer_engine", true}};
}

const Layers* find_layers(std::string_view family) {
  const auto* const at =
      std::ranges::find(kFamilies, family, &std::pair<std::string_view, Layers>::first);
  return at == kFamilies.end() ? nullptr : &at->second;
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

std::optional<std::string> run_config_problem(const models::TransformerConfig& config) {
  const auto& scaling = config.rope_scaling.type;
  if (find_layers(config.family) == nullptr)
    return fmt::format("{}: Megatron-Bridge's model of this family is not known", config.family);
  if (config.head != models::Head::kLanguageModel)
    return fmt::format("{}: Megatron-Bridge has no such head", config.family);
  if (config.multi_latent_attention && config.q_lora_rank == 0)
    return fmt::format(
        "{}: has no q_lora_rank: Megatron-Bridge's model then has a norm before q that this one "
        "lacks",
        config.family);
  if (!scaling.empty() && scaling != "linear" && scaling != "llama3" &&
      !(scaling == "yarn" && config.multi_latent_attention))
    return fmt::format("{}: scales positions by {}, for which Megatron-LM has no argument",
                       config.family, scaling);
  if (!config.window_attn_skip_freq.empty())
    return fmt::format("{}: has layers of two kinds of attention", config.family);
  return std::nullopt;
}

std::optional<std::string> run_config_problem(const Checkpoint& source, MegatronLayout layout) {
  if (layout != MegatronLayout::kLanguageModel || (source.hf && !source.hf->part.empty()))
    return fmt::format("{}: Megatron-Bridge opens whole language models", source.map.config.family);
  return run_config_problem(source.map.config);
}

std::string run_config_text(distckpt::PickleValue namespace_of_args,
                            const std::string& family,
                            const std::string& hf_model_id) {
  const auto args = plain_args(namespace_of_args);
  const auto is_set = [&](const char* name) { return args.value(name, ordered_json()) == true; };
  const bool latent = is_set("multi_latent_attention");
  ordered_json model;
  model["_target_"] = std::string("megatron.bridge.models.") +
                      (latent ? "mla_provider.MLAModelProvider" : "gpt_provider.GPTModelProvider");
  add_fields(kFields, args, model);
  if (latent) add_fields(kLatentFields, args, model);
  model["share_embeddings_and_output_weights"] = !is_set("untie_embeddings_and_output_weights");
  model["params_dtype"] = named(is_set("bf16")   ? "torch.bfloat16"
                                : is_set("fp16") ? "torch.float16"
                                                 : "torch.float32");
  if (is_set("use_rope_scaling")) {
    const auto factor = args.value("rope_scaling_factor", ordered_json());
    model["rope_scaling_factor"] =
        factor.is_null() ? ordered_json(8.0) : factor;  // Megatron-LM's default
  }
  if (is_set("swiglu")) {
    model["gated_linear_unit"] = true;
    model["activation_func"] = named("torch.nn.functional.silu");
  }
  if (!model.value("num_moe_experts", ordered_json()).is_null())
    model["moe_token_dispatcher_type"] = "alltoall";
  if (const auto* const layers = find_layers(family); *layers != Layers::kPlain)
    model["transformer_layer_spec"] = layer_spec(*layers);
  if (!hf_model_id.empty()) model["hf_model_id"] = hf_model_id;
  std::string text = "model:\n";
  for (const auto& [name, value] : model.items())
    text += fmt::format("  {}: {}\n", name, yaml(value));
  return text;
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
  distckpt::replace_text(path, run_config_text(*args, checkpoint.map.config.family, hf_model_id),
                         static_cast<unsigned>(mode) & 0666U);
  return path;
}

}  // namespace ferry::converter
