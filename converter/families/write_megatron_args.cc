#include <algorithm>
#include <cmath>
#include <functional>
#include <set>
#include <span>
#include <string>

#include "converter/families/megatron_args.h"
#include "converter/families/megatron_fields.h"
#include "distckpt/formats/torch_save/pickle_copy.h"
#include "models/spec/yarn.h"

namespace ferry::converter {
namespace {

using distckpt::DType;
using distckpt::PickleValue;
using distckpt::PickleWriter;
using models::Activation;
using models::ParallelConfig;
using models::RopeType;
using models::TransformerConfig;

// key = value of a Namespace, for each kind of value.
class ArgumentWriter {
 public:
  explicit ArgumentWriter(PickleWriter& pickle) : pickle_(pickle) {}
  void set(std::string_view key, bool value) { begin(key).boolean(value); }
  void set(std::string_view key, std::int64_t value) { begin(key).integer(value); }
  void set(std::string_view key, int value) { begin(key).integer(value); }
  void set(std::string_view key, double value) { begin(key).real(value); }
  void set(std::string_view key, const char* value) { begin(key).string(value); }
  void set(std::string_view key, std::string_view value) { begin(key).string(value); }
  void set_none(std::string_view key) { begin(key).none(); }
  void set(std::string_view key, std::optional<int> value) {
    value ? begin(key).integer(*value) : begin(key).none();
  }
  void set(std::string_view key, PickleValue value) { write_value(begin(key), value); }
  void set(std::span<const AnyField> fields, const TransformerConfig& config) {
    each_field(fields, [&](const auto& field) {
      const auto& value = config.*field.member;
      const bool none = field.none_if_zero && value == 0;
      none ? set_none(field.argument) : set(field.argument, value);
    });
  }

  void set(std::string_view key, const std::vector<bool>& layers) {
    auto& list = begin(key).begin_list();
    for (const bool one : layers) list.integer(one ? 1 : 0);
    list.end_list();
  }

  // The key; its value is to follow.
  PickleWriter& begin(std::string_view key) {
    written_.emplace(key);
    return pickle_.string(key);
  }
  bool has(std::string_view key) const { return written_.contains(key); }

 private:
  PickleWriter& pickle_;
  std::set<std::string, std::less<>> written_;
};

// mscale and mscale_all_dim of YaRN, with which Megatron-Core multiplies the angles by what
// transformers multiplies them by.
void write_yarn_scale(ArgumentWriter& args, const models::RopeScaling& scaling) {
  const double all_dim = scaling.mscale_all_dim.value_or(0.0);
  const double mscale = scaling.mscale.value_or(0.0);
  const bool both = mscale != 0 && all_dim != 0;
  double written = both ? mscale : 1.0;
  if (scaling.factor > 1 && (scaling.attention_factor || (!both && all_dim != 0))) {
    const double attention_factor =
        scaling.attention_factor.value_or(models::yarn_mscale(scaling.factor, 1.0));
    const double times = attention_factor * models::yarn_mscale(scaling.factor, all_dim);
    written = (times - 1.0) / (0.1 * std::log(scaling.factor));
  }
  args.set("mscale", written);
  args.set("mscale_all_dim", all_dim);
}

void write_latent_attention(ArgumentWriter& args, const TransformerConfig& config) {
  args.set("multi_latent_attention", config.multi_latent_attention);
  if (!config.multi_latent_attention) return;
  args.set(kLatentFields, config);
  const auto& scaling = config.rope_scaling;
  const bool yarn = scaling.type == RopeType::kYarn;
  args.set("rope_type", yarn ? "yarn" : "rope");
  args.set("rotary_scaling_factor", yarn ? scaling.factor : 1.0);
  if (!yarn) {
    args.set("mscale", 1.0);
    return args.set("mscale_all_dim", 1.0);
  }
  write_yarn_scale(args, scaling);
  args.set("beta_fast", scaling.beta_fast.value_or(32.0));
  args.set("beta_slow", scaling.beta_slow.value_or(1.0));
  args.set("original_max_position_embeddings",
           scaling.original_max_position_embeddings.value_or(config.max_position_embeddings));
}

// The layers that look at the sliding window alone: a number N says that every N-th does not.
void write_window_layers(ArgumentWriter& args, const std::vector<bool>& sliding) {
  if (const auto every = period_of_windows(sliding))
    return args.set("window_attn_skip_freq", *every);
  args.set("window_attn_skip_freq", sliding);
}

// YaRN of attention that is not latent, whose arguments Megatron-LM has since it has GPT-OSS.
bool is_plain_yarn(const TransformerConfig& config) {
  return config.rope_scaling.type == RopeType::kYarn && !config.multi_latent_attention;
}

// The settings that Megatron-LM knows since it has GPT-OSS.
void write_sinks_and_yarn(ArgumentWriter& args, const TransformerConfig& config) {
  if (config.activation == Activation::kQuickGeglu) {
    args.set("quick_geglu", true);
    args.set("glu_linear_offset", config.glu_linear_offset);
  }
  if (config.activation_func_clamp_value)
    args.set("activation_func_clamp_value", *config.activation_func_clamp_value);
  if (config.softmax_offset) args.set("softmax_type", "learnable");
  if (!config.window_attn_skip_freq.empty())
    write_window_layers(args, config.window_attn_skip_freq);
  if (!is_plain_yarn(config)) return;
  const auto& scaling = config.rope_scaling;
  args.set("rotary_scaling_factor", scaling.factor);
  args.set("yarn_original_max_position_embeddings",
           scaling.original_max_position_embeddings.value_or(config.max_position_embeddings));
  args.set("yarn_beta_fast", scaling.beta_fast.value_or(32.0));
  args.set("yarn_beta_slow", scaling.beta_slow.value_or(1.0));
  args.set("yarn_correction_range_round_to_int", scaling.truncate.value_or(true));
  write_yarn_scale(args, scaling);
}

void write_experts(ArgumentWriter& args, const TransformerConfig& config) {
  if (config.num_moe_experts == 0) return args.set_none("num_experts");
  args.set("num_experts", config.num_moe_experts);
  // A number says that all layers are alike, a list that they are not, and so that each has keys of
  // its own.
  if (std::ranges::all_of(config.moe_layer_freq, std::identity())) {
    args.set("moe_layer_freq", 1);
  } else {
    args.set("moe_layer_freq", config.moe_layer_freq);
  }
  args.set("moe_ffn_hidden_size", config.moe_ffn_hidden_size);
  args.set("moe_grouped_gemm", true);
  args.set("moe_router_topk", config.moe_router_topk);
  args.set("moe_router_score_function", name_of(config.moe_router_score_function));
  args.set(kRouterFields, config);
}

void write_linear_attention(ArgumentWriter& args, const TransformerConfig& config) {
  if (!config.has_linear_attention()) return;
  args.set("experimental_attention_variant", kGatedDeltaNet);
  args.set("linear_attention_freq", config.linear_attention_freq);
  args.set(kLinearAttentionFields, config);
}

void write_hybrid_layers(ArgumentWriter& args, const TransformerConfig& config) {
  if (!config.is_hybrid_model()) return;
  auto pattern = config.hybrid_layer_pattern;
  for (std::int64_t i = 0; i < config.mtp_num_layers; ++i)
    pattern += "/" + config.mtp_hybrid_override_pattern;
  args.set("is_hybrid_model", true);
  args.set("hybrid_layer_pattern", pattern.c_str());
  args.set(kMambaFields, config);
}

// Layers of a hybrid model do not know positions, but by their order.
const char* position_embedding_type(const TransformerConfig& config) {
  if (config.is_hybrid_model()) return "none";
  return is_plain_yarn(config) ? "yarn" : "rope";
}

void write_model(ArgumentWriter& args, const TransformerConfig& config) {
  args.set(kModelFields, config);
  args.set("group_query_attention", config.num_query_groups != config.num_attention_heads);
  args.set("num_query_groups", config.num_query_groups);
  args.set("kv_channels", config.kv_channels);
  args.set("seq_length", config.max_position_embeddings);
  args.set("max_position_embeddings", config.max_position_embeddings);
  args.set("position_embedding_type", position_embedding_type(config));
  args.set("add_position_embedding", true);
  args.set("use_rotary_position_embeddings", !config.is_hybrid_model());
  // Megatron-LM declares --rotary-base as an integer; takes a fraction from a checkpoint all the
  // same.
  constexpr double kMaxWhole = 1e15;
  if (std::abs(config.rotary_base) < kMaxWhole &&
      std::trunc(config.rotary_base) == config.rotary_base) {
    args.set("rotary_base", static_cast<std::int64_t>(config.rotary_base));
  } else {
    args.set("rotary_base", config.rotary_base);
  }
  args.set(kRotaryFields, config);
  if (!config.no_rope_freq.empty()) args.set("no_rope_freq", config.no_rope_freq);
  if (config.rope_scaling.type == RopeType::kLinear) {
    args.set("rotary_seq_len_interpolation_factor", config.rope_scaling.factor);
  } else {
    args.set_none("rotary_seq_len_interpolation_factor");
  }
  args.set("use_rope_scaling", config.rope_scaling.type == RopeType::kLlama3);
  args.set("rope_scaling_factor",
           config.rope_scaling.type == RopeType::kLlama3 ? config.rope_scaling.factor : 8.0);
  args.set(kBiasFields, config);
  args.set("swiglu", config.activation == Activation::kSilu);
  args.set("squared_relu", config.activation == Activation::kSquaredRelu);
  write_sinks_and_yarn(args, config);
  args.set(kHeadFields, config);
  args.set("normalization", "RMSNorm");
  args.set("norm_epsilon", config.layernorm_epsilon);
  // qk_layernorm of latent attention means the norms of the low-rank paths, which every such model
  // has.
  args.set("qk_layernorm", config.qk_layernorm || config.multi_latent_attention);
  write_latent_attention(args, config);
  if (config.is_sparse()) {
    args.set("experimental_attention_variant", "dsa");
    args.set(kIndexerFields, config);
  }
  write_linear_attention(args, config);
  write_hybrid_layers(args, config);
  args.set("apply_query_key_layer_scaling", false);
  args.set("attention_dropout", 0.0);
  args.set("hidden_dropout", 0.0);
  write_experts(args, config);
  if (config.mtp_num_layers > 0) {
    args.set("mtp_num_layers", config.mtp_num_layers);
  } else {
    args.set_none("mtp_num_layers");
  }
  if (config.sliding_window) {  // tokens to the left, tokens to the right
    args.begin("window_size")
        .begin_tuple()
        .integer(*config.sliding_window - 1)
        .integer(0)
        .end_tuple();
  } else {
    args.set_none("window_size");
  }
  args.set("tokenizer_type", "HuggingFaceTokenizer");
  args.set_none("tokenizer_model");
  args.set_none("vocab_file");
  args.set("vocab_size", config.vocab_size);
}

void write_layout(ArgumentWriter& args,
                  const TransformerConfig& config,
                  const ParallelConfig& parallel) {
  args.set("padded_vocab_size", parallel.padded_vocab_size(config.vocab_size));
  args.set("make_vocab_size_divisible_by", parallel.make_vocab_size_divisible_by);
  args.set("tensor_model_parallel_size", parallel.tensor_model_parallel_size);
  args.set("pipeline_model_parallel_size", parallel.pipeline_model_parallel_size);
  args.set("virtual_pipeline_model_parallel_size", parallel.virtual_pipeline_model_parallel_size);
  args.set("decoder_first_pipeline_num_layers", parallel.num_layers_in_first_pipeline_stage);
  args.set("decoder_last_pipeline_num_layers", parallel.num_layers_in_last_pipeline_stage);
  args.set("account_for_embedding_in_pipeline_split",
           parallel.account_for_embedding_in_pipeline_split);
  args.set("account_for_loss_in_pipeline_split", parallel.account_for_loss_in_pipeline_split);
  if (parallel.pipeline_model_parallel_layout.empty()) {
    args.set_none("pipeline_model_parallel_layout");
  } else {
    args.set("pipeline_model_parallel_layout", parallel.pipeline_model_parallel_layout.c_str());
  }
  args.set("context_parallel_size", 1);
  args.set("expert_model_parallel_size", parallel.expert_model_parallel_size);
  args.set("expert_tensor_parallel_size", parallel.expert_tensor_parallel());
}

// Writes the arguments of a run that has not begun.
void write_run(ArgumentWriter& args) {
  args.set("data_parallel_random_init", false);
  args.set_none("phase_transition_iterations");
  args.set("ckpt_fully_parallel_save", true);
  args.set("async_save", false);
  args.set("use_distributed_optimizer", false);
  args.set("global_batch_size", 1);
  args.set("consumed_train_samples", 0);
  args.set("skipped_train_samples", 0);
  args.set("consumed_valid_samples", 0);
}

}  // namespace

std::optional<std::int64_t> period_of_windows(const std::vector<bool>& sliding) {
  const auto size = static_cast<std::int64_t>(sliding.size());
  for (std::int64_t every = 2; every <= size; ++every) {
    std::vector<bool> others;
    for (std::int64_t i = 0; i < size; ++i) others.push_back((i + 1) % every != 0);
    if (others == sliding) return every;
  }
  return std::nullopt;
}

void write_args(PickleWriter& pickle,
                const TransformerConfig& config,
                const ParallelConfig& parallel,
                const WrittenState& written,
                std::optional<PickleValue> carried) {
  pickle.begin_object(kArgumentsNamespace);
  ArgumentWriter args(pickle);
  args.set("bf16", written.dtype == DType::kBF16);
  args.set("fp16", written.dtype == DType::kF16);
  args.set("ckpt_format", "torch_dist");
  args.set("use_dist_ckpt", true);
  args.set("no_save_optim", !written.optimizer);
  args.set("no_save_rng", !written.rng);
  args.set("iteration", written.iteration);
  write_layout(args, config, parallel);
  if (!carried || !written.rng) {  // RNG state is that of a run of as many ranks
    args.set("world_size", parallel.world_size());
    args.set("data_parallel_size", parallel.stage_size() / parallel.tensor_model_parallel_size);
  }
  if (!carried) {
    write_model(args, config);
    write_run(args);
  } else {
    for (const auto& [key, value] : carried->object_state().items()) {
      if (key.as_string() == "mtp_num_layers" && config.mtp_num_layers == 0) {
        args.set_none("mtp_num_layers");
      } else if (key.as_string() == "params_dtype") {
        args.begin("params_dtype").global("torch." + std::string(torch_name(written.dtype)));
      } else if (!args.has(key.as_string())) {
        args.set(key.as_string(), value);
      }
    }
  }
  pickle.end_object();
}

}  // namespace ferry::converter
