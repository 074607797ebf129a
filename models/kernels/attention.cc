#include "models/kernels/attention.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

#include "distckpt/error.h"
#include "models/kernels/attention_cuda.h"

namespace ferry::models {
namespace {

// Lengths that the host's matrix products treat alike: products of 16 rows, sums of 16 terms in
// bf16; in fp32 MKL sums in panels of 192, and from two whole ones on the length does not matter.
constexpr std::int64_t kRows = 16;
constexpr std::int64_t kFewestFloatKeys = 384;

std::int64_t round_up(std::int64_t value, std::int64_t to) {
  return (value + to - 1) / to * to;
}

// [rows, heads, dim] -> [heads, length, dim], with zeros behind.
at::Tensor by_heads(const at::Tensor& rows, std::int64_t length) {
  const auto heads_first = rows.transpose(0, 1);
  if (rows.size(0) == length) return heads_first;
  return at::constant_pad_nd(heads_first, {0, 0, 0, length - rows.size(0)});
}

at::Tensor repeat_groups(const at::Tensor& x, std::int64_t heads) {  // [groups, keys, dim]
  const auto each = heads / x.size(0);
  if (each == 1) return x;
  return x.unsqueeze(1)
      .expand({x.size(0), each, x.size(1), x.size(2)})
      .reshape({heads, x.size(1), x.size(2)});
}

// 0 where row i sees key j, the least value elsewhere: [rows, keys].
at::Tensor causal_mask(const AttentionSegment& segment,
                       std::int64_t rows,
                       std::int64_t keys,
                       const AttentionOptions& options,
                       const at::TensorOptions& like) {
  const auto first = segment.num_keys - segment.num_queries;
  const auto at_row = (at::arange(rows, like.dtype(at::kLong)) + first).unsqueeze(1);
  const auto at_key = at::arange(keys, like.dtype(at::kLong)).unsqueeze(0);
  auto hidden = at_key > at_row;
  if (options.window) hidden = hidden.logical_or(at_key <= at_row - *options.window);
  const double least = like.dtype() == at::kFloat
                           ? static_cast<double>(std::numeric_limits<float>::lowest())
                           : static_cast<double>(std::numeric_limits<c10::BFloat16>::lowest());
  return at::zeros({rows, keys}, like).masked_fill(hidden, least);
}

at::Tensor eager(const at::Tensor& query,
                 const at::Tensor& key,
                 const at::Tensor& value,
                 const AttentionSegment& segment,
                 const AttentionOptions& options) {
  const auto heads = query.size(1);
  const bool bitwise = options.alignment == Alignment::kBitwise;
  const auto rows = bitwise ? round_up(segment.num_queries, kRows) : segment.num_queries;
  auto keys = bitwise ? round_up(segment.num_keys, kRows) : segment.num_keys;
  if (bitwise && query.scalar_type() == at::kFloat) keys = std::max(keys, kFewestFloatKeys);
  const auto q = by_heads(query.narrow(0, segment.query_begin, segment.num_queries), rows);
  const auto k = repeat_groups(
      by_heads(key.narrow(0, segment.key_begin, segment.num_keys), keys), heads);
  const auto v = repeat_groups(
      by_heads(value.narrow(0, segment.key_begin, segment.num_keys), keys), heads);
  auto weights = at::matmul(q, k.transpose(1, 2)) * options.scale;
  weights = weights + causal_mask(segment, rows, keys, options, query.options());
  weights = at::softmax(weights, -1, at::kFloat).to(query.scalar_type());
  return at::matmul(weights, v).transpose(0, 1).narrow(0, 0, segment.num_queries);
}

}  // namespace

at::Tensor attention(const at::Tensor& query,
                     const at::Tensor& key,
                     const at::Tensor& value,
                     const std::vector<AttentionSegment>& segments,
                     const AttentionOptions& options) {
  if (query.is_cuda()) {
    return attention_cuda(query, key, value, segments, options,
                          gpu_attention_of(query.size(2), value.size(2)));
  }
  std::vector<at::Tensor> parts;
  std::int64_t covered = 0;
  const auto fill_to = [&](std::int64_t row) {
    if (row > covered)
      parts.push_back(at::zeros({row - covered, query.size(1), value.size(2)}, query.options()));
    covered = row;
  };
  for (const auto& segment : segments) {
    require(segment.query_begin >= covered && segment.num_keys >= segment.num_queries,
            ErrorKind::kBug, "segments of queries have to ascend, with all keys behind them");
    fill_to(segment.query_begin);
    parts.push_back(eager(query, key, value, segment, options));
    covered += segment.num_queries;
  }
  fill_to(query.size(0));
  return parts.size() == 1 ? parts[0] : at::cat(parts);
}

}  // namespace ferry::models
