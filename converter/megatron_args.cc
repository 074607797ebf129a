#include "converter/megatron_args.h"

#include <cmath>
#include <string>

#include "converter/families.h"
#include "distckpt/error.h"

namespace ferry::converter {
namespace {

using distckpt::DType;
using distckpt::ParallelConfig;
using distckpt::PickleValue;
using distckpt::PickleWriter;
using distckpt::TransformerConfig;

// key = value of a Namespace, for each kind of value.
class ArgumentWriter {
 public:
  explicit ArgumentWriter(PickleWriter& pickle) : pickle_(pickle) {}
  void set(std::string_view key, bool value) { pickle_.string(key).boolean(value); }
  void set(std::string_view key, std::int64_t value) { pickle_.string(key).integer(value); }
  void set(std::string_view key, int value) { pickle_.string(key).integer(value); }
  void set(std::string_view key, double value) { pickle_.string(key).real(value); }
  void set(std::string_view key, const char* value) { pickle_.string(key).string(value); }
  void set_none(std::string_view key) { pickle_.string(key).none(); }
  void set(std::string_view key, std::optional<int> value) {
    pickle_.string(key);
    value ? pickle_.integer(*value) : pickle_.none();
  }

 private:
  PickleWriter& pickle_;
};

void write_args(PickleWriter& pickle,
                const TransformerConfig& config,
                const ParallelConfig& parallel,
                DType dtype,
                std::int64_t iteration) {
  pickle.begin_object("argparse.Namespace");
  ArgumentWriter args(pickle);
  // The model.
  args.set("num_layers", config.num_layers);
  args.set("hidden_size", config.hidden_size);
  args.set("ffn_hidden_size", config.ffn_hidden_size);
  args.set("num_attention_heads", config.num_attention_heads);
  args.set("group_query_attention", config.num_query_groups != config.num_attention_heads);
  args.set("num_query_groups", config.num_query_groups);
  args.set("kv_channels", config.kv_channels);
  args.set("seq_length", config.max_position_embeddings);
  args.set("max_position_embeddings", config.max_position_embeddings);
  args.set("position_embedding_type", "rope");
  args.set("add_position_embedding", true);
  args.set("use_rotary_position_embeddings", true);
  // Megatron-LM declares --rotary-base as an integer; takes a fraction from a checkpoint all the same.
  if (const auto whole = static_cast<std::int64_t>(config.rotary_base);
      static_cast<double>(whole) == config.rotary_base) {
    args.set("rotary_base", whole);
  } else {
    args.set("rotary_base", config.rotary_base);
  }
  args.set("rotary_percent", 1.0);
  args.set("rotary_interleaved", false);
  if (config.rope_scaling.type == "linear") {
    args.set("rotary_seq_len_interpolation_factor", config.rope_scaling.factor);
  } else {
    args.set_none("rotary_seq_len_interpolation_factor");
  }
  args.set("use_rope_scaling", config.rope_scaling.type == "llama3");
  args.set("rope_scaling_factor",
           config.rope_scaling.type == "llama3" ? config.rope_scaling.factor : 8.0);
  args.set("add_bias_linear", config.add_bias_linear);
  args.set("add_qkv_bias", config.add_qkv_bias);
  args.set("swiglu", true);
  args.set("squared_relu", false);
  args.set("untie_embeddings_and_output_weights", config.untie_embeddings_and_output_weights);
  args.set("apply_layernorm_1p", false);
  args.set("normalization", "RMSNorm");
  args.set("norm_epsilon", config.layernorm_epsilon);
  args.set("qk_layernorm", config.qk_layernorm);
  args.set("multi_latent_attention", false);
  args.set("apply_query_key_layer_scaling", false);
  args.set("attention_dropout", 0.0);
  args.set("hidden_dropout", 0.0);
  args.set_none("num_experts");
  args.set_none("mtp_num_layers");
  if (config.sliding_window) {  // tokens to the left, tokens to the right
    pickle.string("window_size")
        .begin_tuple()
        .integer(*config.sliding_window - 1)
        .integer(0)
        .end_tuple();
  } else {
    args.set_none("window_size");
  }
  // The vocabulary.
  args.set("tokenizer_type", "HuggingFaceTokenizer");
  args.set_none("tokenizer_model");
  args.set_none("vocab_file");
  args.set("vocab_size", config.vocab_size);
  args.set("padded_vocab_size", parallel.padded_vocab_size(config.vocab_size));
  args.set("make_vocab_size_divisible_by", parallel.make_vocab_size_divisible_by);
  // The layout.
  args.set("tensor_model_parallel_size", parallel.tensor_model_parallel_size);
  args.set("pipeline_model_parallel_size", parallel.pipeline_model_parallel_size);
  args.set_none("virtual_pipeline_model_parallel_size");
  args.set("decoder_first_pipeline_num_layers", parallel.num_layers_in_first_pipeline_stage);
  args.set("decoder_last_pipeline_num_layers", parallel.num_layers_in_last_pipeline_stage);
  args.set("context_parallel_size", 1);
  args.set("expert_model_parallel_size", 1);
  args.set("world_size", parallel.model_parallel_size());
  args.set("data_parallel_size", 1);
  args.set("data_parallel_random_init", false);
  args.set_none("phase_transition_iterations");
  // The checkpoint: weights alone.
  args.set("bf16", dtype == DType::kBF16);
  args.set("fp16", dtype == DType::kF16);
  args.set("ckpt_format", "torch_dist");
  args.set("use_dist_ckpt", true);
  args.set("ckpt_fully_parallel_save", true);
  args.set("async_save", false);
  args.set("use_distributed_optimizer", false);
  args.set("no_save_optim", true);
  args.set("no_save_rng", true);
  args.set("iteration", iteration);
  args.set("global_batch_size", 1);
  args.set("consumed_train_samples", 0);
  args.set("skipped_train_samples", 0);
  args.set("consumed_valid_samples", 0);
  pickle.end_object();
}

// Reads fields of a Namespace; an absent one and None are "not given".
class ArgumentReader {
 public:
  explicit ArgumentReader(PickleValue args) : args_(args) {}

  std::optional<PickleValue> find(std::string_view key) const {
    auto value = args_.find(key);
    return value && value->is_none() ? std::nullopt : value;
  }
  std::int64_t integer(std::string_view key) const {
    const auto value = find(key);
    require(value.has_value(), ErrorKind::kCorrupt, "the checkpoint's arguments lack {}", key);
    return value->as_int();
  }
  std::int64_t integer(std::string_view key, std::int64_t otherwise) const {
    const auto value = find(key);
    return value ? value->as_int() : otherwise;
  }
  bool flag(std::string_view key, bool otherwise) const {
    const auto value = find(key);
    return value ? value->as_bool() : otherwise;
  }
  double number(std::string_view key, double otherwise) const {
    const auto value = find(key);
    return value ? value->as_float() : otherwise;
  }

 private:
  PickleValue args_;
};

}  // namespace

void write_common_state(PickleWriter& pickle,
                        const TransformerConfig& config,
                        const ParallelConfig& parallel,
                        DType dtype,
                        const distckpt::Iteration& iteration) {
  pickle.begin_dict();
  pickle.string("args");
  write_args(pickle, config, parallel, dtype, iteration.number.value_or(0));
  pickle.string("checkpoint_version").real(3.0);
  pickle.string("iteration").integer(iteration.number.value_or(0));
  pickle.string("num_floating_point_operations_so_far").integer(0);
  pickle.string("content_metadata")
      .begin_dict()
      .string("singleton_local_shards")
      .boolean(false)
      .string("chained_optim_avoid_prefix")
      .boolean(true)
      .end_dict();
  pickle.end_dict();
}

std::optional<TransformerConfig> read_args(PickleValue common_state) {
  const auto namespace_value = common_state.find("args");
  if (!namespace_value || !namespace_value->is_object("argparse.Namespace")) return std::nullopt;
  const ArgumentReader args(namespace_value->object_state());
  if (!args.find("num_layers")) return std::nullopt;
  TransformerConfig config;
  config.num_layers = args.integer("num_layers");
  config.hidden_size = args.integer("hidden_size");
  config.num_attention_heads = args.integer("num_attention_heads");
  config.ffn_hidden_size = args.integer("ffn_hidden_size");
  config.num_query_groups = args.flag("group_query_attention", false)
                                ? args.integer("num_query_groups")
                                : config.num_attention_heads;
  constexpr std::int64_t kMax = std::int64_t{1} << 31;
  for (const auto size : {config.num_layers, config.hidden_size, config.num_attention_heads,
                          config.ffn_hidden_size, config.num_query_groups}) {
    require(size >= 1 && size < kMax, ErrorKind::kCorrupt,
            "the checkpoint's arguments hold a size of {}", size);
  }
  config.kv_channels = args.integer("kv_channels", config.hidden_size / config.num_attention_heads);
  config.vocab_size = args.integer("vocab_size", 0);
  config.max_position_embeddings = args.integer("max_position_embeddings", 0);
  config.layernorm_epsilon = args.number("norm_epsilon", 1e-5);
  config.rotary_base = args.number("rotary_base", 10000.0);
  config.add_qkv_bias = args.flag("add_qkv_bias", false);
  config.add_bias_linear = args.flag("add_bias_linear", true);
  config.qk_layernorm = args.flag("qk_layernorm", false);
  config.untie_embeddings_and_output_weights =
      args.flag("untie_embeddings_and_output_weights", false);
  require(!args.find("num_experts"), ErrorKind::kLayout,
          "the checkpoint is of a mixture of experts, whose family is not known");
  require(!args.flag("multi_latent_attention", false), ErrorKind::kLayout,
          "the checkpoint is of a model with latent attention, whose family is not known");
  // Settings that change what the weights mean, and that no family here has.
  for (const auto* key : {"apply_layernorm_1p", "rotary_interleaved"}) {
    require(!args.flag(key, false), ErrorKind::kLayout,
            "the checkpoint was trained with {}, which no known family has", key);
  }
  if (args.flag("use_rope_scaling", false)) {  // the only kind that Megatron-LM has: Llama 3's
    config.rope_scaling.type = "llama3";
    config.rope_scaling.factor = args.number("rope_scaling_factor", 8.0);
  }
  if (const auto factor = args.find("rotary_seq_len_interpolation_factor")) {
    config.rope_scaling.type = "linear";
    config.rope_scaling.factor = factor->as_float();
  }
  if (const auto window = args.find("window_size")) {
    config.sliding_window = (*window)[0].as_int() + 1;
  }
  config.family = infer_family(config);
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
  same(args.num_layers, config.num_layers, "num_layers");
  same(args.hidden_size, config.hidden_size, "hidden_size");
  same(args.ffn_hidden_size, config.ffn_hidden_size, "ffn_hidden_size");
  same(args.num_attention_heads, config.num_attention_heads, "num_attention_heads");
  same(args.num_query_groups, config.num_query_groups, "num_query_groups");
  same(args.kv_channels, config.kv_channels, "kv_channels");
  same(args.add_qkv_bias, config.add_qkv_bias, "add_qkv_bias");
  same(args.add_bias_linear, config.add_bias_linear, "add_bias_linear");
  same(args.qk_layernorm, config.qk_layernorm, "qk_layernorm");
  same(args.untie_embeddings_and_output_weights, config.untie_embeddings_and_output_weights,
       "untie_embeddings_and_output_weights");
  same(args.layernorm_epsilon, config.layernorm_epsilon, "norm_epsilon");
  // Megatron-LM's own argument is an integer.
  const bool cut = args.rotary_base == std::trunc(args.rotary_base);
  same(args.rotary_base, cut ? std::trunc(config.rotary_base) : config.rotary_base, "rotary_base");
}

}  // namespace ferry::converter
