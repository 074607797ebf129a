#include "trainer/engine/memory_needs.h"

#include <algorithm>

#include "models/distributed/world.h"
#include "models/spec/parallel_config.h"
#include "models/tensor_parallel/parameter_layout.h"
#include "trainer/engine/pipeline/pipeline_order.h"

namespace ferry::trainer {
namespace {

using models::GPTModel;
using models::Recompute;

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
  LayerMemory(const GPTModel& chunk, double keys)
      : config_(chunk.config()),
        hidden_(width(config_.hidden_size)),
        element_(width(distckpt::size_of(chunk.options().dtype))),
        tp_(chunk.mesh().shape().tp()),
        cp_(chunk.mesh().shape().cp()),
        etp_(chunk.mesh().shape().etp()),
        sharers_(chunk.options().sequence_parallel ? tp_ : 1),
        on_host_(!chunk.mesh().world().device().is_cuda()),
        keys_(keys) {}

  LayerBytes of(std::int64_t layer) const {
    LayerBytes bytes{.between = 2 * norm(hidden_) / sharers_};
    if (config_.multi_latent_attention)
      add_latent_attention(bytes);
    else
      add_attention(bytes);
    bytes.feed_forward = config_.is_moe_layer(layer) ? experts() : mlp(config_.ffn_hidden_size);
    return bytes;
  }

  // The final norm, and the gradient that the loss makes of its hidden states.
  double head() const { return norm(hidden_) / sharers_ + element_ * hidden_; }
  // One copy of what goes from layer to layer.
  double stream() const { return element_ * hidden_ / sharers_; }

 private:
  // A GPU's kernel keeps its input; the host the input, widened, and its normed values.
  double norm(double size) const { return (on_host_ ? kFp32 + element_ : element_) * size; }

  void add_attention(LayerBytes& bytes) const {
    const auto heads = width(config_.num_attention_heads) / tp_;
    const auto queries = heads * width(config_.kv_channels);
    const auto keys =
        std::max(1.0, width(config_.num_query_groups) / tp_) * width(config_.kv_channels);
    bytes.attention = element_ * (hidden_ + queries);
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
    bytes.attention =
        element_ * (hidden_ + values) + latent(config_.q_lora_rank) + latent(config_.kv_lora_rank);
    add_core(bytes, heads, queries, queries, values);
  }

  // Of a GPU: queries, keys, values and a number a row. Of the host: copies by heads, of keys and
  // values one for each, and the probabilities. The result is what the projection keeps.
  void add_core(LayerBytes& bytes, double heads, double queries, double keys, double values) const {
    bytes.core_inputs = element_ * (queries + keys + values);
    bytes.core = element_ * (queries + cp_ * (keys + values)) + kFp32 * heads;
    if (on_host_) {
      const auto of_values = heads * values / std::max(1.0, keys) * queries / heads;
      bytes.core = element_ * (2 * queries + of_values) +
                   heads * keys_ * (element_ == kFp32 ? kFp32 : kFp32 + element_);
    }
  }

  // The input, gate and up, the host's silu(gate), and their product.
  double mlp(std::int64_t ffn) const {
    return element_ * (hidden_ + (on_host_ ? 4.0 : 3.0) * width(ffn) / tp_);
  }

  // The router's input and scores, and of each choice of a token its row, the experts' and what
  // they made of it.
  double experts() const {
    const auto choices = width(config_.moe_router_topk) / sharers_;
    auto bytes =
        element_ * hidden_ / sharers_ + kFp32 * width(config_.num_moe_experts) / sharers_ +
        element_ * choices *
            ((etp_ + 1) * hidden_ + (on_host_ ? 4.0 : 3.0) * width(config_.moe_ffn_hidden_size));
    if (config_.moe_shared_expert_intermediate_size > 0)
      bytes += mlp(config_.moe_shared_expert_intermediate_size);
    return bytes;
  }

  const models::TransformerConfig& config_;
  double hidden_, element_;
  double tp_, cp_, etp_;
  double sharers_;  // of the tokens between the layers
  bool on_host_;
  double keys_;
};

std::int64_t largest_leaf_bytes(const GPTModel& chunk) {
  std::int64_t largest = 0;
  for (const auto& leaf : chunk.parameters().leaves())
    largest = std::max(largest, static_cast<std::int64_t>(leaf.value.nbytes()));
  return largest;
}

// Bytes per token that a chunk keeps until its backward pass, and those that come and go in it.
struct ChunkBytes {
  double kept = 0;
  double passing = 0;
};

ChunkBytes chunk_bytes(const GPTModel& chunk, const Recompute& recompute, double keys) {
  const LayerMemory memory(chunk, keys);
  const auto& layers = chunk.stage().layers;
  const bool full = recompute.granularity == Recompute::Granularity::kFull;
  const bool uniform = full && recompute.method == Recompute::Method::kUniform;
  ChunkBytes bytes;
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
      const bool moe = chunk.config().is_moe_layer(layers[i]);
      if (recompute.selects(moe ? &Recompute::Modules::moe : &Recompute::Modules::mlp))
        layer.feed_forward = memory.stream();
      bytes.kept += layer.whole();
      group = whole;
    }
    bytes.passing = std::max(bytes.passing, group);
  }
  if (chunk.stage().post_process) bytes.kept += memory.head();
  return bytes;
}

}  // namespace

ModelMemory model_memory(const models::TransformerConfig& config,
                         const models::ParallelState& mesh,
                         const models::ModelOptions& options) {
  ModelMemory memory;
  const auto& shape = mesh.shape();
  for (const auto& stage : models::stage_chunks(config, shape.parallel(), mesh.coordinates().pp)) {
    for (const auto& spec :
         models::parameter_layout(config, shape, mesh.coordinates(), stage,
                                  {.alignment = options.alignment, .dtype = options.dtype})) {
      const auto elements = spec.shape.product();
      const auto sharers = spec.expert ? shape.edp() : shape.dp() * shape.cp();
      memory.parameters += elements * distckpt::size_of(spec.dtype);
      if (!spec.trained) continue;
      memory.gradients += elements * kFp32;
      const auto copies = spec.dtype == distckpt::DType::kF32 ? 2 : 3;
      memory.optimizer += elements * kFp32 * copies / sharers;
    }
  }
  return memory;
}

std::int64_t activation_bytes(const GPTModel& chunk,
                              const Recompute& recompute,
                              const MicroBatchShape& shape) {
  return static_cast<std::int64_t>(chunk_bytes(chunk, recompute, shape.keys).kept *
                                   width(shape.tokens));
}

std::int64_t logits_bytes(const GPTModel& chunk, std::int64_t tokens) {
  if (!chunk.stage().post_process || chunk.config().head != models::Head::kLanguageModel) return 0;
  const auto element = distckpt::size_of(chunk.options().dtype);
  const auto vocab = chunk.mesh().shape().parallel().padded_vocab_size(chunk.config().vocab_size) /
                     chunk.mesh().shape().tp();
  const auto rows = std::min(tokens, models::OutputHead{}.chunk_tokens);
  const auto of_weight = vocab * chunk.config().hidden_size;
  const bool on_host = !chunk.mesh().world().device().is_cuda();
  // The host's kernel has four more tensors like the logits, in fp32, and widens others first.
  const auto temporary = on_host ? (element == kFp32 ? 4 : 5) * kFp32 : 0;
  return rows * vocab * (element + temporary) +
         of_weight * (rows < tokens ? kFp32 + element : element);
}

std::int64_t batch_bytes(const std::vector<GPTModel*>& chunks,
                         const Recompute& recompute,
                         const MicroBatchShape& largest,
                         std::size_t num_micro_batches) {
  const auto& mesh = chunks.front()->mesh();
  const auto stages = static_cast<std::size_t>(mesh.shape().pp());
  // An interleaved pipeline takes whole groups.
  const auto groups = chunks.size() > 1 ? stages : 1;
  const auto order =
      pipeline_order({.stages = stages,
                      .stage = static_cast<std::size_t>(mesh.coordinates().pp),
                      .chunks = chunks.size(),
                      .micro_batches = (num_micro_batches + groups - 1) / groups * groups});
  std::vector<double> of_chunk;
  std::vector<double> passing;
  for (const auto* const chunk : chunks) {
    const auto bytes = chunk_bytes(*chunk, recompute, largest.keys);
    of_chunk.push_back(bytes.kept * width(largest.tokens));
    passing.push_back(
        std::max(bytes.passing * width(largest.tokens) + width(largest_leaf_bytes(*chunk)),
                 width(logits_bytes(*chunk, largest.tokens))));
  }
  double kept = 0;
  double most = 0;
  for (const auto& step : order) {
    if (step.forward) kept += of_chunk[step.chunk];
    most = std::max(most, kept + passing[step.chunk]);
    if (!step.forward) kept -= of_chunk[step.chunk];
  }
  return static_cast<std::int64_t>(most);
}

std::int64_t tokens_that_fit(const std::vector<GPTModel*>& chunks,
                             const Recompute& recompute,
                             const MicroBatchShape& like,
                             std::size_t num_micro_batches,
                             std::int64_t bytes) {
  std::int64_t fits = 0;
  for (auto step = std::int64_t{1} << 30; step > 0; step /= 2) {
    const MicroBatchShape longer{.tokens = fits + step, .keys = like.keys};
    if (batch_bytes(chunks, recompute, longer, num_micro_batches) <= bytes) fits += step;
  }
  return fits;
}

}  // namespace ferry::trainer
