#include "models/spec/costs.h"

#include <algorithm>
#include <numeric>

#include "distckpt/base/integers.h"

namespace ferry::models {
namespace {

constexpr std::int64_t kFp32 = 4;

double width(std::int64_t size) {
  return static_cast<double>(size);
}

// Bytes per token that one layer keeps, part by part.
struct LayerBytes {
  double between = 0;      // of the stream that layers add to
  double attention = 0;    // around its core
  double core = 0;         // that core_attn computes again
  double core_inputs = 0;  // and what it does so from
  double feed_forward = 0;

  double whole() const { return between + attention + core + feed_forward; }
};

class LayerMemory {
 public:
  LayerMemory(const ChunkOnRank& chunk, double keys)
      : config_(*chunk.config),
        hidden_(width(config_.hidden_size)),
        element_(width(distckpt::size_of(chunk.dtype))),
        tp_(chunk.mesh->tp()),
        cp_(chunk.mesh->cp()),
        etp_(chunk.mesh->etp()),
        sharers_(chunk.sequence_parallel ? tp_ : 1),
        gathers_(chunk.alignment == Alignment::kBitwise),
        on_host_(chunk.on_host),
        keys_(keys) {}

  LayerBytes of(std::int64_t layer) const {
    const double norms =
        (config_.pre_norm ? 2 : 0) + (config_.post_norm == PostNorm::kNone ? 0 : 2);
    LayerBytes bytes{.between = norms * norm(hidden_) / sharers_};
    if (config_.is_linear_attention_layer(layer))
      add_delta_net(bytes);
    else if (config_.multi_latent_attention)
      add_latent_attention(bytes);
    else
      add_attention(bytes);
    bytes.feed_forward = config_.is_moe_layer(layer) ? experts() : mlp(config_.ffn_hidden_size);
    return bytes;
  }

  // The input of the experts' second products.
  double expert_activations() const {
    return element_ * width(config_.moe_router_topk * config_.moe_ffn_hidden_size) / sharers_;
  }
  // The final norm, and the gradient that the loss makes of its hidden states.
  double head() const { return norm(hidden_) / sharers_ + element_ * hidden_; }
  // One copy of the hidden states between layers.
  double stream() const { return element_ * hidden_ / sharers_; }

 private:
  // A GPU's kernel keeps its input; the host the input, widened, and its normed values, which are
  // in fp32 where the weight is added to 1.
  double norm(double size) const {
    if (config_.layernorm_zero_centered_gamma) return 2 * kFp32 * size;
    return (on_host_ ? kFp32 + element_ : element_) * size;
  }

  // The input of a product by rows, of which a rank has `part`, where it is gathered: beside that
  // part, which what computed it keeps.
  double gathered(double part) const { return gathers_ && tp_ > 1 ? element_ * tp_ * part : 0; }

  void add_attention(LayerBytes& bytes) const {
    const auto heads = width(config_.num_attention_heads) / tp_;
    const auto queries = heads * width(config_.kv_channels);
    const auto keys =
        std::max(1.0, width(config_.num_query_groups) / tp_) * width(config_.kv_channels);
    bytes.attention = element_ * (hidden_ + queries) + gathered(queries);
    if (config_.attention_output_gate) bytes.attention += 3 * element_ * queries;
    if (config_.qk_layernorm) bytes.attention += norm(queries) + norm(keys);
    add_core(bytes, heads, queries, keys, keys);
  }

  void add_latent_attention(LayerBytes& bytes) const {
    const auto heads = width(config_.num_attention_heads) / tp_;
    const auto queries = heads * width(config_.qk_head_dim + config_.qk_pos_emb_head_dim);
    const auto values = heads * width(config_.v_head_dim);
    const auto latent = [&](std::int64_t rank) {
      return norm(width(rank)) / sharers_ + element_ * width(rank);
    };
    bytes.attention = element_ * (hidden_ + values) + gathered(values) +
                      latent(config_.q_lora_rank) + latent(config_.kv_lora_rank);
    add_core(bytes, heads, queries, queries, values);
  }

  // The rule in models/kernels/delta/ keeps for each value head in fp32, of sizes of a key: query,
  // key, their normed and scaled ones, key times beta, decayed ones, and the keys that the
  // triangular system gives; of a value: value, value times beta, the system's solution, the part
  // that is new, the result and its normed one; of a chunk: decays, both masked products, and the
  // system; and the state of each chunk.
  void add_delta_net(LayerBytes& bytes) const {
    const auto heads = width(config_.linear_num_value_heads) / tp_;
    const auto key = width(config_.linear_key_head_dim);
    const auto value = width(config_.linear_value_head_dim);
    const auto channels = 2 * width(config_.linear_num_key_heads) / tp_ * key + heads * value;
    constexpr auto kChunk = static_cast<double>(kDeltaChunk);
    bytes.attention =
        element_ * (hidden_ + 4 * channels + 4 * heads * value) + gathered(heads * value) +
        kFp32 * heads * (10 * key + 7 * value + 5 * kChunk + 2 * key * value / kChunk);
  }

  // A GPU keeps queries, keys, values and a number a row; the host keeps copies by heads, of keys
  // and values one for each, and the probabilities. The result is what the projection keeps.
  void add_core(LayerBytes& bytes, double heads, double queries, double keys, double values) const {
    bytes.core_inputs = element_ * (queries + keys + values);
    bytes.core = element_ * (queries + cp_ * (keys + values)) + kFp32 * heads;
    if (on_host_) {
      const bool in_fp32 = !config_.softmax_offset && element_ < kFp32;
      const auto of_values = heads * values / std::max(1.0, keys) * queries / heads;
      bytes.core = element_ * (2 * queries + of_values) +
                   heads * keys_ * (in_fp32 ? kFp32 + element_ : element_);
      if (config_.attn_logit_softcapping) bytes.core += heads * keys_ * element_;
    }
  }

  // Gate and up, and their product; on the host silu(gate), too, or every step of GPT-OSS's
  // activation.
  double activations(std::int64_t ffn) const {
    if (config_.activation == Activation::kGeluTanh) return 4 * width(ffn);
    if (!on_host_) return 3 * width(ffn);
    return (config_.activation == Activation::kQuickGeglu ? 7 : 4) * width(ffn);
  }

  // The input, and its activations, the last of which is gathered and kept as that alone.
  double mlp(std::int64_t ffn) const {
    const auto others = gathers_ ? element_ * width(ffn) * (1 - 1 / tp_) : 0;
    return element_ * (hidden_ + activations(ffn) / tp_) + others;
  }

  // The router's input and scores, and for each choice of a token its row, the experts' activations
  // and their result, of which a rank of several that share an expert has its columns in kBitwise.
  double experts() const {
    const auto choices = width(config_.moe_router_topk) / sharers_;
    auto bytes =
        element_ * hidden_ / sharers_ + kFp32 * width(config_.num_moe_experts) / sharers_ +
        element_ * choices *
            ((etp_ + (gathers_ ? 1 : etp_)) * hidden_ + activations(config_.moe_ffn_hidden_size));
    if (gathers_) bytes += element_ * choices * (etp_ - 1) * width(config_.moe_ffn_hidden_size);
    if (config_.moe_shared_expert_intermediate_size > 0)
      bytes += mlp(config_.moe_shared_expert_intermediate_size);
    return bytes;
  }

  const TransformerConfig& config_;
  double hidden_, element_;
  double tp_, cp_, etp_;
  double sharers_;  // of the tokens between the layers
  bool gathers_;    // what ranks have of the input of a product by rows
  bool on_host_;
  double keys_;
};

// Elements of a layer's matrices that a token is multiplied with: of the experts, only those that
// it is sent to. The gate of shared experts, one row, is counted as verl does, in hybrids alone.
// `feed_forward`: without those of attention.
std::int64_t weights_of_layer(const TransformerConfig& config,
                              std::int64_t layer,
                              bool feed_forward = false) {
  std::int64_t weights = 0;
  for (const auto& section : layer_sections(config, layer)) {
    for (const auto& row : section.table->rows) {
      if (!row.when(config) || row.columns == extent::kNone ||
          (row.rows == extent::kOne && !config.has_linear_attention()) ||
          (feed_forward && !row.name.starts_with("mlp.")))
        continue;
      const auto rows = merged_rows(row, config);
      weights += std::accumulate(rows.begin(), rows.end(), std::int64_t{0}) * row.columns(config) *
                 std::max<std::int64_t>(1, row.depth(config)) *
                 (row.per_expert ? config.moe_router_topk : 1);
    }
  }
  return weights;
}

struct TokenCounts {
  double sum = 0;
  double squares = 0;
};
TokenCounts count_tokens(std::span<const std::int64_t> lengths) {
  TokenCounts counts;
  for (const auto length : lengths) {
    counts.sum += width(length);
    counts.squares += width(length) * width(length);
  }
  return counts;
}

// The forward operations of causal attention in all layers, by the squares of lengths.
std::int64_t attention_flops(const TransformerConfig& config) {
  const bool latent = config.multi_latent_attention;
  const auto query = latent ? config.qk_head_dim + config.qk_pos_emb_head_dim : config.kv_channels;
  const auto value = latent ? config.v_head_dim : config.kv_channels;
  return (query + value) * config.num_attention_heads * config.num_key_value_layers();
}

}  // namespace

ModelMemory& ModelMemory::operator+=(const ModelMemory& other) {
  parameters += other.parameters;
  gradients += other.gradients;
  optimizer += other.optimizer;
  on_host += other.on_host;
  return *this;
}

ModelMemory model_memory(std::span<const ParameterSpec> parameters,
                         const MeshShape& mesh,
                         const TrainingDtypes& training) {
  ModelMemory memory;
  for (const auto& spec : parameters) {
    const auto elements = spec.shape.product();
    const auto sharers = spec.expert ? mesh.edp() : mesh.dp() * mesh.cp();
    memory.parameters += elements * distckpt::size_of(spec.dtype);
    if (!spec.trained) continue;
    memory.gradients +=
        elements * (training.grad_reduce_in_fp32 ? kFp32 : distckpt::size_of(spec.dtype));
    const auto state = (spec.dtype == distckpt::DType::kF32 ? 0 : kFp32) +
                       distckpt::size_of(training.exp_avg) + distckpt::size_of(training.exp_avg_sq);
    memory.optimizer += elements * state / sharers;
  }
  return memory;
}

KeyValueShape key_value_shape(const TransformerConfig& config,
                              std::int64_t tp,
                              Alignment alignment) {
  if (config.multi_latent_attention && alignment == Alignment::kFast)
    return {.groups = 1, .dim = config.kv_lora_rank + config.qk_pos_emb_head_dim, .value_dim = 0};
  if (config.multi_latent_attention) {
    return {.groups = config.num_attention_heads / tp,
            .dim = config.qk_head_dim + config.qk_pos_emb_head_dim,
            .value_dim = config.v_head_dim};
  }
  return {.groups = std::max<std::int64_t>(1, config.num_query_groups / tp),
          .dim = config.kv_channels,
          .value_dim = config.kv_channels};
}

std::int64_t key_value_bytes(const TransformerConfig& config,
                             std::int64_t tp,
                             const LayoutOptions& options) {
  const auto shape = key_value_shape(config, tp, options.alignment);
  return config.num_key_value_layers() * shape.groups * (shape.dim + shape.value_dim) *
         distckpt::size_of(options.dtype);
}

std::int64_t gathered_bytes(const TransformerConfig& config,
                            std::int64_t tp,
                            const LayoutOptions& options,
                            std::int64_t keys) {
  const auto shape = key_value_shape(config, tp, options.alignment);
  auto channels = 2 * shape.groups * (shape.dim + shape.value_dim);
  if (config.multi_latent_attention && options.alignment == Alignment::kFast) {
    const auto expanded = key_value_shape(config, tp, Alignment::kBitwise);
    channels += 2 * expanded.groups * (expanded.dim + expanded.value_dim);
  }
  return keys * channels * distckpt::size_of(options.dtype);
}

LinearStateShape linear_state_shape(const TransformerConfig& config,
                                    std::int64_t tp,
                                    Alignment alignment,
                                    bool on_host) {
  const auto keys = config.linear_num_key_heads * config.linear_key_head_dim;
  const auto values = config.linear_num_value_heads * config.linear_value_head_dim;
  return {.channels = (2 * keys + values) / tp,
          .kernel = config.linear_conv_kernel_dim,
          .heads = config.linear_num_value_heads / tp,
          .key_dim = config.linear_key_head_dim,
          .value_dim = config.linear_value_head_dim,
          .rows = alignment == Alignment::kBitwise && on_host ? kDeltaChunk - 1 : 0};
}

// A prefix is read by the samples of a prompt, which begin in the step after the one that computes
// it: eight of them to a prompt are usual.
LinearStateSlots linear_state_slots(const TransformerConfig& config,
                                    std::int64_t max_num_seqs,
                                    bool caches_prefixes) {
  constexpr std::int64_t kSamples = 8;
  if (!config.has_linear_attention()) return {};
  return {.sequences = max_num_seqs,
          .prefixes = caches_prefixes ? distckpt::ceil_div(max_num_seqs, kSamples) : 0};
}

std::int64_t linear_state_bytes(const TransformerConfig& config,
                                std::int64_t tp,
                                const LayoutOptions& options,
                                bool on_host) {
  if (!config.has_linear_attention()) return 0;
  const auto shape = linear_state_shape(config, tp, options.alignment, on_host);
  const auto element = distckpt::size_of(options.dtype);
  const auto of_layer = shape.channels * (shape.kernel - 1 + shape.rows) * element +
                        shape.heads * shape.key_dim * shape.value_dim * kFp32 +
                        shape.rows * shape.heads * (element + kFp32);
  return (config.num_layers - config.num_key_value_layers()) * of_layer;
}

ActivationBytes activation_bytes(const ChunkOnRank& chunk,
                                 const Recompute& recompute,
                                 double keys) {
  const LayerMemory memory(chunk, keys);
  const auto& layers = chunk.stage->layers;
  const bool full = recompute.granularity == Recompute::Granularity::kFull;
  const bool uniform = full && recompute.method == Recompute::Method::kUniform;
  ActivationBytes bytes;
  double group = 0;  // of layers that are computed again together
  for (std::size_t i = 0; i < layers.size(); ++i) {
    auto layer = memory.of(layers[i]);
    const auto whole = layer.whole();
    const auto place = static_cast<std::int64_t>(i);
    if (uniform || (full && place < recompute.num_layers)) {
      const bool first = !uniform || place % recompute.num_layers == 0;
      if (first) bytes.kept += 2 * memory.stream();
      group = first ? whole : group + whole;
    } else {
      if (recompute.selects(&Recompute::Modules::core_attn)) layer.core = layer.core_inputs;
      const bool moe = chunk.config->is_moe_layer(layers[i]);
      if (recompute.selects(moe ? &Recompute::Modules::moe : &Recompute::Modules::mlp))
        layer.feed_forward = memory.stream();
      else if (moe && recompute.selects(&Recompute::Modules::moe_act))
        layer.feed_forward -= memory.expert_activations();
      bytes.kept += layer.whole();
      group = whole;
    }
    bytes.passing = std::max(bytes.passing, group);
  }
  if (chunk.stage->post_process) bytes.kept += memory.head();
  return bytes;
}

std::int64_t logits_bytes(const ChunkOnRank& chunk, std::int64_t tokens) {
  if (!chunk.stage->post_process || chunk.config->head != Head::kLanguageModel) return 0;
  const auto element = distckpt::size_of(chunk.dtype);
  const auto vocab =
      chunk.mesh->parallel().padded_vocab_size(chunk.config->vocab_size) / chunk.mesh->tp();
  const auto rows = std::min(tokens, kLogitsTokens);
  const auto of_weight = vocab * chunk.config->hidden_size;
  // The host's kernel has four more tensors like the logits, in fp32, and widens others first.
  const auto temporary = chunk.on_host ? (element == kFp32 ? 4 : 5) * kFp32 : 0;
  const auto capped = chunk.config->final_logit_softcapping ? 3 * element : 0;
  const auto gradient =
      rows * vocab * temporary + of_weight * (rows < tokens ? kFp32 + element : element);
  // Rows as they arrive, rank by rank, and in one piece.
  const auto gathered =
      chunk.alignment == Alignment::kBitwise && chunk.mesh->tp() > 1
          ? rows * vocab * chunk.mesh->tp() * std::max(2 * element, element + temporary)
          : 0;
  return rows * vocab * (element + capped) + std::max(gradient, gathered);
}

double training_flops(const TransformerConfig& config, std::span<const std::int64_t> lengths) {
  auto weights = 2 * config.vocab_size * config.hidden_size;
  for (std::int64_t layer = 0; layer < config.num_layers; ++layer)
    weights += weights_of_layer(config, layer);
  const auto tokens = count_tokens(lengths);
  const auto per_token = 15 * (config.num_layers - config.num_key_value_layers()) *
                         config.linear_num_value_heads * config.linear_key_head_dim *
                         config.linear_value_head_dim;
  return tokens.sum * width(6 * weights + per_token) +
         tokens.squares * width(3 * attention_flops(config));
}

double selective_flops(const TransformerConfig& config,
                       const Recompute::Modules& modules,
                       std::span<const std::int64_t> lengths) {
  std::int64_t weights = 0;
  for (std::int64_t layer = 0; layer < config.num_layers; ++layer)
    if (config.is_moe_layer(layer) ? modules.moe : modules.mlp)
      weights += weights_of_layer(config, layer, /*feed_forward=*/true);
  const auto tokens = count_tokens(lengths);
  return tokens.sum * width(2 * weights) +
         (modules.core_attn ? tokens.squares * width(attention_flops(config)) : 0);
}

double vision_flops(const VisionConfig& vision, std::span<const std::int64_t> image_tokens) {
  const auto hidden = vision.hidden_size;
  const auto merged = vision.merged_size();
  const auto patch =
      vision.in_channels * vision.temporal_patch_size * vision.patch_size * vision.patch_size;
  const auto of_block = 4 * hidden * hidden + 2 * hidden * vision.intermediate_size;
  const auto mergers = 1 + std::ssize(vision.deepstack_visual_indexes);
  const auto of_patch = patch * hidden + vision.depth * of_block;
  const auto of_token = mergers * merged * (merged + vision.out_hidden_size);
  double operations = 0;
  for (const auto tokens : image_tokens) {
    const auto patches = width(tokens * vision.spatial_merge_size * vision.spatial_merge_size);
    operations += 2 * (patches * width(of_patch) + width(tokens) * width(of_token)) +
                  width(4 * vision.depth * hidden) * patches * patches;
  }
  return operations;
}

std::int64_t vision_activation_bytes(const VisionConfig& vision,
                                     std::int64_t hidden_size,
                                     distckpt::DType dtype) {
  constexpr std::int64_t kInBlock = 12;    // norms, queries, keys, values, results, sums
  constexpr std::int64_t kInRotation = 4;  // fp32
  const auto size = distckpt::size_of(dtype);
  const auto hidden = vision.merged_size();
  const auto ffn = vision.intermediate_size * hidden / vision.hidden_size;
  const auto mergers = 1 + std::ssize(vision.deepstack_visual_indexes);
  return (vision.depth * hidden + 2 * (kInBlock * hidden + 2 * ffn)) * size +
         kInRotation * hidden * kFp32 + mergers * (3 * hidden + hidden_size) * size;
}

}  // namespace ferry::models
