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
  kNone,      // the tensor has no such dimension
  kHidden,    // hidden_size
  kFfn,       // ffn_hidden_size
  kHeads,     // num_attention_heads * kv_channels
  kGroups,    // with kQkvGroups: kHeads for q, num_query_groups * kv_channels for k and v
  kChannels,  // kv_channels
  kVocab,     // vocab_size; padded in Megatron
};

// Which models have the tensor.
enum class When : std::uint8_t { kAlways, kQkvBias, kLinearBias, kQkNorm, kUntied };

// Which pipeline stage has it.
enum class Stage : std::uint8_t { kFirst, kLayer, kLast };

struct Rule {
  std::string_view megatron;
  Merge merge = Merge::kCopy;
  Split split = Split::kNone;
  std::string_view hf;  // {a,b,c} stands for one tensor each
  Extent rows = Extent::kHidden;
  Extent columns = Extent::kNone;
  When when = When::kAlways;
};

// Modules that keep an `_extra_state` in checkpoints of Transformer Engine models.
struct ExtraStateRule {
  std::string_view module;
  When when = When::kAlways;
};

struct RuleTable {
  std::string_view hf_layer;        // "model.layers.{l}."
  std::string_view megatron_layer;  // "decoder.layers."
  std::span<const Rule> first;      // of the first stage; whole names
  std::span<const Rule> layer;      // of every layer; names below the two prefixes
  std::span<const Rule> last;       // of the last stage; whole names
  std::span<const ExtraStateRule> layer_extra_states;
  std::span<const ExtraStateRule> last_extra_states;
};

}  // namespace ferry::converter
