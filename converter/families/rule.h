// The rules of a family: which Hugging Face tensors make up which Megatron-Core tensor. Data, no
// code: converting, loading and verifying all read the same table. docs/mapping.md works an example
// in numbers.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace ferry::converter {

// How the Hugging Face tensors of a rule lie in the Megatron tensor.
enum class Merge : std::uint8_t {
  kCopy,       // one tensor, as it is
  kQkvGroups,  // for each query group: its queries, its key, its value
  kGateUp,     // gate over up
};

// What tensor parallelism splits.
enum class Split : std::uint8_t {
  kNone,    // every rank has all of it
  kColumn,  // the first dimension (of each half, for kGateUp)
  kRow,     // the second
};

// The size of a dimension of one Hugging Face tensor of the rule.
enum class Extent : std::uint8_t {
  kNone,           // the tensor has no such dimension
  kHidden,         // hidden_size
  kTwiceHidden,    // 2 * hidden_size
  kFfn,            // ffn_hidden_size
  kMoeFfn,         // moe_ffn_hidden_size
  kSharedFfn,      // moe_shared_expert_intermediate_size
  kExperts,        // num_moe_experts
  kOne,            // 1
  kHeads,          // num_attention_heads * kv_channels
  kGroups,         // with kQkvGroups: kHeads for q, num_query_groups * kv_channels for k and v
  kChannels,       // kv_channels
  kVocab,          // vocab_size; padded in Megatron
  kLabels,         // num_labels
  kQLora,          // q_lora_rank
  kKvLora,         // kv_lora_rank
  kKvLoraAndRope,  // kv_lora_rank + qk_pos_emb_head_dim
  kQHeads,         // num_attention_heads * (qk_head_dim + qk_pos_emb_head_dim)
  kKvHeads,        // num_attention_heads * (qk_head_dim + v_head_dim)
  kVHeads,         // num_attention_heads * v_head_dim
};

// Which models have the tensor.
enum class When : std::uint8_t {
  kAlways,
  kQkvBias,
  kLinearBias,
  kQkNorm,
  kUntied,      // a language model whose output layer is not the embedding
  kScore,       // a classification head
  kScoreBias,   // one of tokens
  kShared,      // shared experts
  kSharedGate,  // shared experts that have a gate
  kExpertBias,  // routers that have a bias
  kQLora,       // queries through a low-rank path
  kNoQLora,     // queries at once
};

struct Rule {
  std::string_view megatron;
  Merge merge = Merge::kCopy;
  Split split = Split::kNone;
  std::string_view hf;  // {a,b,c} stands for one tensor each, {e} for each expert
  Extent rows = Extent::kHidden;
  Extent columns = Extent::kNone;
  When when = When::kAlways;
  bool fp32 = false;  // in Megatron, whatever the model's dtype
};

// Another name that a Megatron tensor may have in a checkpoint: local layer specifications name
// some norms after the module that follows them.
struct AlsoRule {
  std::string_view megatron;
  std::string_view also;
};

// Modules that keep an `_extra_state` in checkpoints of Transformer Engine models.
struct ExtraStateRule {
  std::string_view module;
  When when = When::kAlways;
  bool per_expert = false;
};

// A second Hugging Face tensor that holds the same bytes as another one does: not a tensor of the
// model, but compared, and written where the source had it.
struct CopyRule {
  std::string_view hf;
  std::string_view of;
};

// A prediction layer is written behind the last layer in Hugging Face, as layers.{l}, and as
// mtp.layers.{j} in Megatron. It wraps a decoder layer, whose rules are those of `layer`.
struct MtpTable {
  std::string_view megatron;  // "mtp.layers."
  std::string_view
      transformer_layer;        // "transformer_layer.": before the names of its decoder layer
  std::span<const Rule> rules;  // names below the two layers' prefixes
  std::span<const ExtraStateRule> extra_states;
  std::span<const CopyRule> copies;
};

// Below is every section's place in the pipeline: the first stage, each layer's, the last.
enum class Stage : std::uint8_t { kFirst, kLayer, kMtp, kLast };

struct RuleTable {
  std::string_view hf_layer = "model.layers.{l}.";
  std::string_view megatron_layer = "decoder.layers.";
  std::span<const Rule> first{};      // of the first stage; whole names
  std::span<const Rule> attention{};  // of every layer; names below the two prefixes
  std::span<const Rule> dense_mlp{};  // of layers without experts
  std::span<const Rule> moe_mlp{};    // of layers with experts
  std::span<const Rule> last{};       // of the last stage; whole names
  std::span<const AlsoRule> attention_also{};
  std::span<const AlsoRule> dense_also{};
  std::span<const AlsoRule> moe_also{};
  std::span<const ExtraStateRule> attention_extra_states{};
  std::span<const ExtraStateRule> dense_mlp_extra_states{};
  std::span<const ExtraStateRule> moe_mlp_extra_states{};
  std::span<const ExtraStateRule> last_extra_states{};
  const MtpTable* mtp = nullptr;
};

}  // namespace ferry::converter
