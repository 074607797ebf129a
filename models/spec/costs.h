// The costs of a model by its table of parameters and the shapes of its modules: bytes of weights
// and optimizer, bytes of activations, floating-point operations. Pure functions: they need neither
// a device nor a process group, so a plan of a run is made of them before anything is allocated.
#pragma once

#include <cstdint>
#include <span>

#include "distckpt/base/dtype.h"
#include "models/spec/mesh_shape.h"
#include "models/spec/recompute.h"
#include "models/spec/sharding.h"
#include "models/spec/transformer_config.h"

namespace ferry::models {

// Bytes of a rank.
struct ModelMemory {
  std::int64_t parameters = 0;
  std::int64_t gradients = 0;
  std::int64_t optimizer = 0;  // this rank's shards of moments, and of masters where they are extra
  std::int64_t on_host = 0;    // of these, where they lie there; `optimizer` is then what passes

  std::int64_t total() const { return parameters + gradients + optimizer; }
  ModelMemory& operator+=(const ModelMemory& other);
};

// Slots of a device through which masters and moments that lie on the host pass, for an update: one
// goes up, one is updated, one goes down.
inline constexpr int kNumStagingSlots = 3;
// Elements of a slot: 192 MiB of masters and moments in fp32.
inline constexpr std::int64_t kStagingElements = std::int64_t{16} << 20;
inline constexpr std::int64_t kMaxStagingBytes = kNumStagingSlots * kStagingElements * 12;

struct TrainingDtypes {
  bool grad_reduce_in_fp32 = true;  // else gradients have the dtype of parameters
  distckpt::DType exp_avg = distckpt::DType::kF32;
  distckpt::DType exp_avg_sq = distckpt::DType::kF32;
};

// The bytes of a rank's parameters. Padding to buckets is not counted.
ModelMemory model_memory(std::span<const ParameterSpec> parameters,
                         const MeshShape& mesh,
                         const TrainingDtypes& training = {});

// The cached keys and values of a token in one layer on a tensor parallel rank: keys [groups, dim],
// values [groups, value_dim]. Multi-latent attention in kFast caches its latent and the rotated
// part of the key as one key without a value.
struct KeyValueShape {
  std::int64_t groups = 0;
  std::int64_t dim = 0;
  std::int64_t value_dim = 0;
};
KeyValueShape key_value_shape(const TransformerConfig& config,
                              std::int64_t tp,
                              Alignment alignment);
// Bytes of a token in all layers.
std::int64_t key_value_bytes(const TransformerConfig& config,
                             std::int64_t tp,
                             const LayoutOptions& options);

// Keys that attention gathers from the cache at a time, for prompts whose beginnings are cached:
// those of the longest sequence, or of all new tokens of a step.
constexpr std::int64_t max_gathered_keys(std::int64_t max_model_len,
                                         std::int64_t max_num_batched_tokens) {
  return max_model_len > max_num_batched_tokens ? max_model_len : max_num_batched_tokens;
}
// Bytes of a layer while it does: keys and values in pieces and in one, and of latents the keys and
// values of all heads that they are expanded to.
std::int64_t gathered_bytes(const TransformerConfig& config,
                            std::int64_t tp,
                            const LayoutOptions& options,
                            std::int64_t keys);

// The states that generation keeps of a sequence in a layer with a gated delta net, on a tensor
// parallel rank: inputs of the convolution [kernel - 1, channels], the recurrent state [heads,
// key_dim, value_dim] in fp32, and on the host in kBitwise what came behind the last whole chunk of
// the delta rule: outputs of the convolution [rows, channels], decays (fp32) and betas [rows,
// heads].
struct LinearStateShape {
  std::int64_t channels = 0;
  std::int64_t kernel = 0;
  std::int64_t heads = 0;
  std::int64_t key_dim = 0;
  std::int64_t value_dim = 0;
  std::int64_t rows = 0;
};
LinearStateShape linear_state_shape(const TransformerConfig& config,
                                    std::int64_t tp,
                                    Alignment alignment,
                                    bool on_host);
// Slots for such states in an engine that computes so many sequences at a time: theirs and, if it
// caches prefixes, those of the prefixes that sequences begin with, and one for rows that nobody
// reads. None in models without.
struct LinearStateSlots {
  std::int64_t sequences = 0;
  std::int64_t prefixes = 0;

  std::int64_t total() const { return sequences == 0 ? 0 : sequences + prefixes + 1; }
};
LinearStateSlots linear_state_slots(const TransformerConfig& config,
                                    std::int64_t max_num_seqs,
                                    bool caches_prefixes);
// Bytes of a sequence's states in all such layers; 0 in models without.
std::int64_t linear_state_bytes(const TransformerConfig& config,
                                std::int64_t tp,
                                const LayoutOptions& options,
                                bool on_host);

// A chunk of a model as a rank runs it. Its pointers must outlive it.
struct ChunkOnRank {
  const TransformerConfig* config = nullptr;
  const MeshShape* mesh = nullptr;
  const StageSpec* stage = nullptr;
  distckpt::DType dtype = distckpt::DType::kBF16;
  bool sequence_parallel = false;
  bool on_host = false;
  Alignment alignment = Alignment::kFast;
};

// Bytes per token of a micro-batch: those that a chunk keeps until its backward pass, layer by
// layer as models/transformer computes it, and those that come and go in it (Korthikanti et al.
// 2022, section 4, for these kernels). Experts are taken to have equal shares. `keys`: that a token
// attends to, padding of the causal half included; only the host keeps attention's probabilities.
struct ActivationBytes {
  double kept = 0;
  double passing = 0;
};
ActivationBytes activation_bytes(const ChunkOnRank& chunk, const Recompute& recompute, double keys);

// Tokens of a block of the rollout's cache: as many as flash reads at a time.
constexpr std::int64_t kCacheBlockTokens = 64;

// Tokens whose logits the output layer computes at a time.
constexpr std::int64_t kLogitsTokens = 4096;

// Bytes that the output layer and the loss need on top of these while they run: logits, those that
// kBitwise gathers from tensor parallel ranks, and the gradients that are made with them.
std::int64_t logits_bytes(const ChunkOnRank& chunk, std::int64_t tokens);

// Floating-point operations, forward and backward, without what is recomputed (verl:
// utils/flops_counter.py): six a token and weight that the token meets, the embedding and the
// output layer included; and for attention, causal, 3 (query + value size) of each head by the
// squares of the lengths. (Of multi-latent attention verl counts the query size for that of the
// values, too.) Layers with a gated delta net have instead 15 key size * value size of each token
// and value head.
double training_flops(const TransformerConfig& config, std::span<const std::int64_t> lengths);

// Floating-point operations that Recompute::kSelective computes again for the backward pass: a
// forward pass of the selected modules. Activations of experts have no products.
double selective_flops(const TransformerConfig& config,
                       const Recompute::Modules& modules,
                       std::span<const std::int64_t> lengths);

// Floating-point operations of a vision tower, forward, for images of so many tokens each: two a
// patch and weight of the blocks that the patch meets, two a token and weight of the mergers; and
// for attention, over all patches of an image, 4 hidden_size by the square of their number in each
// block.
double vision_flops(const VisionConfig& vision, std::span<const std::int64_t> image_tokens);

// Bytes for a token's patches in a vision tower that is trained: the inputs of the blocks, each of
// which is computed again, what one block keeps then, with its gradients, and what the mergers
// keep, which give features of `hidden_size` channels.
std::int64_t vision_activation_bytes(const VisionConfig& vision,
                                     std::int64_t hidden_size,
                                     distckpt::DType dtype);

}  // namespace ferry::models
