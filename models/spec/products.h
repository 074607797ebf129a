// The operations of a model and their shapes: which matrices of the table (parameter_table.h) its
// inputs are multiplied with, how ranks share them out (sharding.h), its norms, its attention.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "models/spec/parameter_table.h"
#include "models/spec/sharding.h"
#include "models/spec/transformer_config.h"

namespace ferry::models {

// A product with a weight: y [rows, n] = x [rows, k] times weight [n, k], transposed.
struct GemmShape {
  std::string name{};  // as Megatron names the layer, without the modules around it
  std::int64_t n = 0;
  std::int64_t k = 0;
  bool has_bias = false;  // added by the product
  // The weight's rows that a tensor parallel rank has in kBitwise; nothing: all of them.
  std::optional<Cut> cut{};
  bool grouped = false;               // of one expert, each of which has rows of its own
  const ParameterRow* row = nullptr;  // of the table; of a tied output layer its embedding's

  std::string subject() const;  // "linear_fc2 1536x8960"
  // True of the scores of a classification head.
  bool is_score() const { return row != nullptr && row->when == when::kScore; }
};

// The products of all stages and of the vision tower, in the order of the modules; layers of one
// kind give them once. None with a vocabulary that is not known.
std::vector<GemmShape> gemm_shapes(const TransformerConfig& config);

// The channels over which the RMSNorms of all layers go. LayerNorms, which have a bias (towers,
// indexers), are not among them.
std::set<std::int64_t> norm_widths(const TransformerConfig& config);

struct AttentionShape {
  std::int64_t heads = 0;
  std::int64_t groups = 0;    // heads of keys and values
  std::int64_t channels = 0;  // of a query's and a key's head
  std::int64_t value_channels = 0;

  auto operator<=>(const AttentionShape&) const = default;  // NOLINT(modernize-use-nullptr)
};

// The shapes of attention in all layers, each once; none of delta nets and of towers.
std::set<AttentionShape> attention_shapes(const TransformerConfig& config);

// The channels of a token that tensor parallel ranks share in a decoder layer and gather in
// kBitwise: the k of its products by rows, those of experts aside, whose rows go other ways.
std::int64_t gathered_channels(const TransformerConfig& config, std::int64_t layer);

}  // namespace ferry::models
