// Causal attention of packed sequences: query rows of a segment see the keys of their own sequence
// that are not behind them, and where there are sinks one score more. A segment may be a whole
// sequence, a part of it (context parallelism, chunked prefill) or one token that is decoded: its
// rows are the last ones of its keys.
//
// In kBitwise a row of the result depends on that row, its keys and values alone. The host replays
// Hugging Face's "eager" attention, on lengths that oneDNN treats alike (docs/numerics.md).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "models/spec/alignment.h"

namespace ferry::models {

// The multiple of rows and of keys that the host's kernels are given in kBitwise, so that matrix
// products and softmax treat all lengths alike.
inline constexpr std::int64_t kHostAttentionRows = 16;

struct AttentionSegment {
  std::int64_t query_begin = 0;
  std::int64_t num_queries = 0;
  std::int64_t key_begin = 0;
  std::int64_t num_keys =
      0;  // at least num_queries; query i is at position num_keys - num_queries + i

  bool operator==(const AttentionSegment&) const = default;
};

struct AttentionOptions {
  double scale = 1.0;
  std::optional<std::int64_t> window{};  // keys that a query sees at most, its own among them
  std::optional<double> softcap{};       // c: scores become c * tanh(score / c)
  at::Tensor sinks{};  // [heads]: a score in each head's softmax that has no value; undefined: none
  Alignment alignment = Alignment::kFast;
  bool deterministic = true;  // gradients have the same bits at every run; in kBitwise always
};

// query [queries, heads, dim], key [keys, groups, dim], value [keys, groups, value_dim] ->
// [queries, heads, value_dim]. Query rows outside of all segments give zeros. Differentiable.
at::Tensor attention(const at::Tensor& query,
                     const at::Tensor& key,
                     const at::Tensor& value,
                     const std::vector<AttentionSegment>& segments,
                     const AttentionOptions& options);

// The softmax of scores [.., heads, rows, keys] over the keys, beside each head's sink if there are
// some: in their dtype then, after the largest was subtracted, as GPT-OSS in transformers does.
at::Tensor attention_weights(const at::Tensor& scores, const at::Tensor& sinks);

}  // namespace ferry::models
