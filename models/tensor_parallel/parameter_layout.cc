#include "models/tensor_parallel/parameter_layout.h"

#include <algorithm>
#include <utility>

#include "distckpt/base/error.h"

namespace ferry::models {
namespace {

using distckpt::Box;
using distckpt::Shape;

class Builder {
 public:
  Builder(const TransformerConfig& config,
          const MeshShape& mesh,
          const MeshCoordinates& at,
          const LayoutOptions& options)
      : config_(config), mesh_(mesh), at_(at), options_(options) {}

  void embedding(int copy) {
    auto& table = column("embedding.word_embeddings.weight", {padded_vocab(), config_.hidden_size});
    table.vocab = config_.vocab_size;
    table.replica_id[0] = copy;
  }

  void layer(const std::string& prefix, bool moe) {
    if (config_.multi_latent_attention) {
      latent_attention(prefix);
    } else {
      attention(prefix);
    }
    if (moe) {
      experts(prefix);
    } else {
      mlp(prefix + "mlp.", config_.ffn_hidden_size, config_.add_bias_linear);
      norm(prefix + "mlp.linear_fc1.layer_norm_weight");
    }
  }

  void prediction(std::int64_t index) {
    const auto prefix = fmt::format("mtp.layers.{}.", index);
    norm(prefix + "enorm.weight");
    norm(prefix + "hnorm.weight");
    column(prefix + "eh_proj.weight", {config_.hidden_size, 2 * config_.hidden_size});
    layer(prefix + "transformer_layer.", config_.num_moe_experts > 0);
    norm(prefix + "final_layernorm.weight");
  }

  void head(bool holds_embedding) {
    norm("decoder.final_layernorm.weight");
    if (config_.head == Head::kLanguageModel) {
      if (config_.untie_embeddings_and_output_weights) {
        column("output_layer.weight", {padded_vocab(), config_.hidden_size}).vocab =
            config_.vocab_size;
      } else if (!holds_embedding) {
        embedding(1);
      }
      return;
    }
    whole("output_layer.weight", {config_.num_labels, config_.hidden_size});
    if (config_.head == Head::kTokenClassification)
      whole("output_layer.bias", {config_.num_labels});
  }

  std::vector<ParameterSpec> take() { return std::move(specs_); }

 private:
  std::int64_t padded_vocab() const {
    return mesh_.parallel().padded_vocab_size(config_.vocab_size);
  }

  void attention(const std::string& prefix) {
    const auto queries = config_.num_attention_heads * config_.kv_channels;
    const auto rows = queries + 2 * config_.num_query_groups * config_.kv_channels;
    const auto base = prefix + "self_attention.";
    norm(base + "linear_qkv.layer_norm_weight");
    column(base + "linear_qkv.weight", {rows, config_.hidden_size});
    if (config_.has_qkv_bias()) column(base + "linear_qkv.bias", {rows});
    if (config_.qk_layernorm) {
      whole(base + "q_layernorm.weight", {config_.kv_channels});
      whole(base + "k_layernorm.weight", {config_.kv_channels});
    }
    projection(base + "linear_proj", queries, config_.add_bias_linear);
  }

  void latent_attention(const std::string& prefix) {
    const auto base = prefix + "self_attention.";
    const auto heads = config_.num_attention_heads;
    const auto query_rows = heads * (config_.qk_head_dim + config_.qk_pos_emb_head_dim);
    norm(prefix + "input_layernorm.weight");
    if (config_.q_lora_rank > 0) {
      whole(base + "linear_q_down_proj.weight", {config_.q_lora_rank, config_.hidden_size});
      whole(base + "linear_q_up_proj.layer_norm_weight", {config_.q_lora_rank});
      column(base + "linear_q_up_proj.weight", {query_rows, config_.q_lora_rank});
    } else {
      column(base + "linear_q_proj.weight", {query_rows, config_.hidden_size});
    }
    whole(base + "linear_kv_down_proj.weight",
          {config_.kv_lora_rank + config_.qk_pos_emb_head_dim, config_.hidden_size});
    whole(base + "linear_kv_up_proj.layer_norm_weight", {config_.kv_lora_rank});
    column(base + "linear_kv_up_proj.weight",
           {heads * (config_.qk_head_dim + config_.v_head_dim), config_.kv_lora_rank});
    projection(base + "linear_proj", heads * config_.v_head_dim, false);
  }

  void mlp(const std::string& base, std::int64_t ffn, bool bias) {
    gate_up(base + "linear_fc1.weight", {2 * ffn, config_.hidden_size});
    if (bias) gate_up(base + "linear_fc1.bias", {2 * ffn});
    projection(base + "linear_fc2", ffn, bias);
  }

  void experts(const std::string& prefix) {
    norm(prefix + "pre_mlp_layernorm.weight");
    whole(prefix + "mlp.router.weight", {config_.num_moe_experts, config_.hidden_size});
    if (config_.moe_router_enable_expert_bias) {
      auto& bias = whole(prefix + "mlp.router.expert_bias", {config_.num_moe_experts});
      bias.dtype = distckpt::DType::kF32;
      bias.trained = false;
    }
    const auto local = config_.num_moe_experts / mesh_.ep();
    in_expert_ = true;
    for (auto e = at_.ep * local; e < (at_.ep + 1) * local; ++e)
      mlp(fmt::format("{}mlp.experts.experts.{}.", prefix, e), config_.moe_ffn_hidden_size, false);
    in_expert_ = false;
    if (config_.moe_shared_expert_intermediate_size > 0)
      mlp(prefix + "mlp.shared_experts.", config_.moe_shared_expert_intermediate_size, false);
    if (config_.moe_shared_expert_gate)
      whole(prefix + "mlp.shared_experts.gate_weight", {1, config_.hidden_size});
  }

  void norm(const std::string& key) { whole(key, {config_.hidden_size}); }

  int split() const { return in_expert_ ? mesh_.etp() : mesh_.tp(); }
  int split_rank() const { return in_expert_ ? at_.etp : at_.tp; }

  ParameterSpec& add(const std::string& key, const Shape& shape) {
    const int replica = in_expert_ ? at_.edp : at_.dp * mesh_.cp() + at_.cp;
    specs_.push_back({.key = key,
                      .dtype = options_.dtype,
                      .shape = shape,
                      .global_shape = shape,
                      .replica_id = {0, 0, replica},
                      .expert = in_expert_});
    return specs_.back();
  }

  ParameterSpec& whole(const std::string& key, const Shape& shape) {
    auto& spec = add(key, shape);
    spec.boxes = {Box::whole(shape)};
    spec.replica_id[1] = split_rank();
    return spec;
  }

  // Splits dimension `dim` of each of `parts` equal parts of it.
  ParameterSpec& sharded(const std::string& key, const Shape& shape, int dim, int parts) {
    auto& spec = add(key, shape);
    const auto of_part = shape[dim] / parts;
    require(of_part % split() == 0, ErrorKind::kUsage, "{}: {} {} cannot be split over {} ranks",
            key, of_part, dim == 0 ? "rows" : "columns", split());
    const auto size = of_part / split();
    for (int part = 0; part < parts; ++part) {
      auto box = Box::whole(shape);
      box.offset[dim] = part * of_part + split_rank() * size;
      box.size[dim] = size;
      spec.boxes.push_back(box);
    }
    spec.shape[dim] = parts * size;
    spec.sharing = Sharing::kSharded;
    return spec;
  }

  ParameterSpec& column(const std::string& key, const Shape& shape) {
    return sharded(key, shape, 0, 1);
  }
  void gate_up(const std::string& key, const Shape& shape) { sharded(key, shape, 0, 2); }

  // What Megatron splits by rows of the input: weight [hidden, in].
  void projection(const std::string& module, std::int64_t in, bool bias) {
    const bool bitwise = options_.alignment == Alignment::kBitwise;
    sharded(module + ".weight", {config_.hidden_size, in}, bitwise ? 0 : 1, 1);
    if (bias) whole(module + ".bias", {config_.hidden_size});
  }

  const TransformerConfig& config_;
  const MeshShape& mesh_;
  const MeshCoordinates& at_;
  const LayoutOptions& options_;
  bool in_expert_ = false;
  std::vector<ParameterSpec> specs_;
};

}  // namespace

std::vector<distckpt::ShardedTensor> ParameterSpec::sharded_tensors() const {
  std::vector<distckpt::ShardedTensor> shards;
  for (const auto& box : boxes) {
    shards.push_back({.key = key,
                      .dtype = dtype,
                      .local_shape = box.size,
                      .global_shape = global_shape,
                      .global_offset = box.offset,
                      .replica_id = replica_id});
  }
  return shards;
}

std::vector<StageSpec> stage_chunks(const TransformerConfig& config,
                                    const ParallelConfig& parallel,
                                    int stage) {
  const auto stages = pipeline_stages(parallel, static_cast<int>(config.num_layers),
                                      static_cast<int>(config.mtp_num_layers));
  std::vector<StageSpec> chunks;
  for (int chunk = 0; chunk < stages.num_chunks; ++chunk) {
    StageSpec spec{.stage = stage,
                   .chunk = chunk,
                   .pre_process = stage == stages.embedding && chunk == 0,
                   .post_process = stage == stages.loss && chunk == stages.num_chunks - 1};
    const auto collect = [&](const std::vector<int>& of, const std::vector<int>& chunk_of,
                             std::vector<std::int64_t>& into) {
      for (std::size_t i = 0; i < of.size(); ++i) {
        if (of[i] == stage && chunk_of[i] == chunk) into.push_back(static_cast<std::int64_t>(i));
      }
    };
    collect(stages.layers, stages.layer_chunks, spec.layers);
    collect(stages.mtp, stages.mtp_chunks, spec.mtp);
    chunks.push_back(std::move(spec));
  }
  return chunks;
}

std::vector<int> embedding_stages(const TransformerConfig& config, const ParallelConfig& parallel) {
  const bool tied =
      config.head == Head::kLanguageModel && !config.untie_embeddings_and_output_weights;
  std::vector<int> stages;
  for (int stage = 0; stage < parallel.pipeline_model_parallel_size; ++stage) {
    const auto chunks = stage_chunks(config, parallel, stage);
    const bool holds = std::ranges::any_of(chunks, [&](const StageSpec& chunk) {
      return chunk.pre_process || !chunk.mtp.empty() || (chunk.post_process && tied);
    });
    if (holds) stages.push_back(stage);
  }
  return stages;
}

std::vector<ParameterSpec> parameter_layout(const TransformerConfig& config,
                                            const MeshShape& mesh,
                                            const MeshCoordinates& at,
                                            const StageSpec& stage,
                                            const LayoutOptions& options) {
  Builder builder(config, mesh, at, options);
  // A tied head on another stage than the embedding, and prediction layers, hold it a second time.
  bool holds_embedding = stage.pre_process;
  if (holds_embedding) builder.embedding(0);
  for (const auto layer : stage.layers)
    builder.layer(fmt::format("decoder.layers.{}.", layer), config.is_moe_layer(layer));
  if (!stage.mtp.empty() && !holds_embedding) {
    builder.embedding(1);
    holds_embedding = true;
  }
  for (const auto layer : stage.mtp) builder.prediction(layer);
  if (stage.post_process) builder.head(holds_embedding);
  return builder.take();
}

}  // namespace ferry::models
