#include "models/kernels/attention.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

#include "models/kernels/attention_cuda.h"
#include "models/kernels/segments.h"

namespace ferry::models {
namespace {

// oneDNN adds up the terms of a sum in blocks of 1024, but in two of 512 where there are as many or
// fewer: then zeros are added until there are more.
constexpr std::int64_t kShortBlock = 512;
constexpr std::int64_t kBlock = 1024;
// Of one head alone the smallest products have bits of their own.
constexpr std::int64_t kFewestHeads = 2;

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
  const auto rows =
      bitwise ? round_up(segment.num_queries, kHostAttentionRows) : segment.num_queries;
  auto keys = bitwise ? round_up(segment.num_keys, kHostAttentionRows) : segment.num_keys;
  if (bitwise && query.scalar_type() == at::kFloat) keys = std::max(keys, kHostFloatKeys);
  if (bitwise && keys > kShortBlock && keys <= kBlock) keys = kBlock + kHostAttentionRows;
  const auto repeats = bitwise && heads < kFewestHeads ? kFewestHeads : 1;
  const auto lay_out = [&](const at::Tensor& x, std::int64_t begin, std::int64_t size,
                           std::int64_t length) {
    const auto laid_out = by_heads(x.narrow(0, begin, size), 0, length - size);
    return repeats == 1 ? laid_out : laid_out.repeat({repeats, 1, 1});
  };
  const auto q = lay_out(query, segment.query_begin, segment.num_queries, rows);
  const auto k = repeat_groups(lay_out(key, segment.key_begin, segment.num_keys, keys), q.size(0));
  const auto v =
      repeat_groups(lay_out(value, segment.key_begin, segment.num_keys, keys), q.size(0));
  auto weights = at::matmul(q, k.transpose(1, 2)) * options.scale;
  weights = weights + causal_mask(segment, rows, keys, options, query.options());
  weights = at::softmax(weights, -1, at::kFloat).to(query.scalar_type());
  return at::matmul(weights, v)
      .narrow(0, 0, heads)
      .transpose(0, 1)
      .narrow(0, 0, segment.num_queries);
}

}  // namespace

at::Tensor attention(const at::Tensor& query,
                     const at::Tensor& key,
                     const at::Tensor& value,
                     const std::vector<AttentionSegment>& all_segments,
                     const AttentionOptions& options) {
  if (query.is_cuda()) {
    return attention_cuda(query, key, value, all_segments, options,
                          gpu_attention_of(query.size(2), value.size(2)));
  }
  const auto segments = with_queries(all_segments);
  if (segments.empty())
    return at::zeros({query.size(0), query.size(1), value.size(2)}, query.options());
  std::vector<at::Tensor> parts;
  for (const auto& segment : segments) parts.push_back(eager(query, key, value, segment, options));
  return at_their_places(parts.size() == 1 ? parts[0] : at::cat(parts), segments, query.size(0));
}

}  // namespace ferry::models
