#include "models/kernels/attention/attention.h"

#include <ATen/ATen.h>
#include <cpuid.h>

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

#include "models/kernels/attention/attention_cuda.h"
#include "models/kernels/attention/segments.h"
#include "models/kernels/product/float_chains.h"
#include "models/kernels/product/float_product.h"
#include "models/kernels/whole_vectors.h"

namespace ferry::models {
namespace {

// oneDNN adds up the terms of a sum in blocks of 1024, but in two of 512 where there are as many or
// fewer: then zeros are added until there are more.
constexpr std::int64_t kShortBlock = 512;
constexpr std::int64_t kBlock = 1024;
// The smallest products of a single head have other bits, and LibTorch gives oneDNN only products
// of more terms in all (mkldnn_gemm_min_size of aten/src/ATen/native/mkldnn/Matmul.cpp).
constexpr std::int64_t kFewestHeads = 2;
constexpr std::int64_t kOneDnnTerms = std::int64_t{16} * 16 * 16;
// LibTorch adds up products with fewer terms in all by another loop (bmm_out_or_baddbmm_ of
// aten/src/ATen/native/LinearAlgebra.cpp).
constexpr std::int64_t kFewestTerms = 400;
// Scores of short sequences that are computed at a time: with fewer the calls take longer than the
// arithmetic, and more do not fit the caches.
constexpr std::int64_t kScoresAtOnce = std::int64_t{1} << 20;

// Says whether LibTorch gives products of bf16 on the host to oneDNN (mkldnn_bf16_device_check).
bool has_onednn_bf16() {
  static const bool has = [] {
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
      return true;
    constexpr unsigned kNeConvert = 1U << 5U;
    unsigned eax = 0;
    unsigned ebx = 0;
    unsigned ecx = 0;
    unsigned edx = 0;
    return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (edx & kNeConvert) != 0;
  }();
  return has;
}

// Says whether each element of x's products is a sum of its own, whose bits do not depend on the
// number of rows and heads.
bool adds_up_alone(const at::Tensor& x) {
  return x.is_cpu() && x.scalar_type() == at::kBFloat16 && !has_onednn_bf16();
}

// Rows of queries whose products with so many keys LibTorch takes for no small ones. A single row
// would have other strides.
std::int64_t fewest_rows(std::int64_t keys, std::int64_t channels) {
  return std::max<std::int64_t>(2, (kFewestTerms + keys * channels - 1) / (keys * channels));
}

// The times that heads are repeated for oneDNN to multiply them. `terms`: of a head's products.
std::int64_t repeats_of(std::int64_t heads, std::int64_t terms) {
  return std::max(heads < kFewestHeads ? kFewestHeads : 1, kOneDnnTerms / (heads * terms) + 1);
}

at::Tensor repeat_groups(const at::Tensor& x, std::int64_t heads) {  // [count, groups, keys, dim]
  const auto each = heads / x.size(1);
  if (each == 1) return x;
  return x.unsqueeze(2)
      .expand({x.size(0), x.size(1), each, x.size(2), x.size(3)})
      .reshape({x.size(0), heads, x.size(2), x.size(3)});
}

// Segments of one shape, which are computed together: where the rows of each begin.
struct Shape {
  std::int64_t num_queries = 0;
  std::int64_t num_keys = 0;
  auto operator<=>(const Shape&) const = default;  // NOLINT(modernize-use-nullptr)
};
struct Alike {
  Shape shape{};
  std::vector<std::int64_t> query_begins{};
  std::vector<std::int64_t> key_begins{};

  std::int64_t count() const { return static_cast<std::int64_t>(query_begins.size()); }
};

double least_score(const at::TensorOptions& like) {
  if (like.dtype() == at::kFloat) return std::numeric_limits<float>::lowest();
  if (like.dtype() == at::kHalf) return std::numeric_limits<c10::Half>::lowest();
  return std::numeric_limits<c10::BFloat16>::lowest();
}

// 0 where row i sees key j, the least value elsewhere: [rows, keys].
at::Tensor causal_mask(const Shape& shape,
                       std::int64_t rows,
                       std::int64_t keys,
                       const AttentionOptions& options,
                       const at::TensorOptions& like) {
  const auto first = shape.num_keys - shape.num_queries;
  const auto at_row = (at::arange(rows, like.dtype(at::kLong)) + first).unsqueeze(1);
  const auto at_key = at::arange(keys, like.dtype(at::kLong)).unsqueeze(0);
  auto hidden = at_key > at_row;
  if (options.window) hidden = hidden.logical_or(at_key <= at_row - *options.window);
  return at::zeros({rows, keys}, like).masked_fill(hidden, least_score(like));
}

// Groups in the order in which their shapes are first met. In kBitwise each segment is a group of
// its own: the bits of oneDNN's batched products are not known.
std::vector<Alike> group(const std::vector<AttentionSegment>& segments,
                         std::int64_t heads,
                         bool alone) {
  std::vector<Alike> groups;
  std::map<Shape, std::size_t> open;
  for (const auto& segment : segments) {
    const Shape shape{segment.num_queries, segment.num_keys};
    const auto most = alone ? 1 : kScoresAtOnce / (heads * shape.num_queries * shape.num_keys);
    auto [found, is_new] = open.try_emplace(shape, groups.size());
    if (!is_new && groups[found->second].count() >= most) {
      found->second = groups.size();
      is_new = true;
    }
    if (is_new) groups.push_back({.shape = shape});
    groups[found->second].query_begins.push_back(segment.query_begin);
    groups[found->second].key_begins.push_back(segment.key_begin);
  }
  return groups;
}

// query [count, queries, heads, dim], key [count, keys, groups, dim], value [count, keys, groups,
// value_dim] -> [count, queries, heads, value_dim]
at::Tensor eager(const at::Tensor& query,
                 const at::Tensor& key,
                 const at::Tensor& value,
                 const AttentionOptions& options) {
  const Shape shape{query.size(1), key.size(1)};
  const auto heads = query.size(2);
  const auto channels = std::min(query.size(3), value.size(3));
  const bool bitwise = options.alignment == Alignment::kBitwise;
  const bool in_chains = bitwise && is_host_float(query);
  const bool alone = bitwise && adds_up_alone(query);
  const bool padded_rows = bitwise && !in_chains && !alone;
  auto keys = bitwise ? round_up(shape.num_keys, kHostAttentionRows) : shape.num_keys;
  auto rows = padded_rows ? round_up(shape.num_queries, kHostAttentionRows) : shape.num_queries;
  if (alone) rows = std::max(rows, fewest_rows(keys, channels));
  if (padded_rows && keys > kShortBlock && keys <= kBlock) keys = kBlock + kHostAttentionRows;
  const auto repeats = padded_rows ? repeats_of(heads, rows * keys * channels) : 1;
  const auto lay_out = [&](const at::Tensor& x, std::int64_t length) {
    const auto padded =
        x.size(1) == length ? x : at::constant_pad_nd(x, {0, 0, 0, 0, 0, length - x.size(1)});
    const auto by_heads = padded.transpose(1, 2);
    return repeats == 1 ? by_heads : by_heads.repeat({1, repeats, 1, 1});
  };
  const auto q = lay_out(query, rows);
  const auto k = repeat_groups(lay_out(key, keys), q.size(1));
  const auto v = repeat_groups(lay_out(value, keys), q.size(1));
  const auto multiply = [&](const at::Tensor& a, const at::Tensor& b, std::int64_t chain) {
    return in_chains ? float_matmul(a, b, chain) : at::matmul(a, b);
  };
  auto weights = multiply(q, k.transpose(2, 3), chain_length(q.size(3))) * options.scale;
  weights = soft_capped(weights, options.softcap);
  weights = weights + causal_mask(shape, rows, keys, options, query.options());
  const auto& sinks = options.sinks;
  weights = attention_weights(weights, sinks.defined() ? sinks.repeat({repeats}) : sinks);
  return multiply(weights, v, host::kLongestChain)
      .narrow(1, 0, heads)
      .transpose(1, 2)
      .narrow(1, 0, shape.num_queries);
}

// The rows of each group, one after another. One gather and one split serve all groups: a slice for
// each would make a gradient of all rows for each.
class RowsOfGroups {
 public:
  void add(const std::vector<std::int64_t>& begins, std::int64_t size) {
    for (const auto begin : begins)
      for (std::int64_t i = 0; i < size; ++i) order_.push_back(begin + i);
    sizes_.push_back(static_cast<std::int64_t>(begins.size()) * size);
  }

  bool is_all(std::int64_t num_rows) const {
    if (static_cast<std::int64_t>(order_.size()) != num_rows) return false;
    for (std::int64_t i = 0; i < num_rows; ++i)
      if (order_[static_cast<std::size_t>(i)] != i) return false;
    return true;
  }

  std::vector<at::Tensor> take(const at::Tensor& rows) const {
    const auto ordered = is_all(rows.size(0)) ? rows : rows.index_select(0, order_on(rows));
    return ordered.split_with_sizes(sizes_);
  }

  // The reverse of the gather: zeros where no group has a row.
  at::Tensor put(const at::Tensor& ordered, std::int64_t num_rows) const {
    if (is_all(num_rows)) return ordered;
    auto shape = ordered.sizes().vec();
    shape[0] = num_rows;
    return ordered.new_zeros(shape).index_copy(0, order_on(ordered), ordered);
  }

 private:
  std::vector<std::int64_t> order_{};
  std::vector<std::int64_t> sizes_{};

  at::Tensor order_on(const at::Tensor& rows) const { return at::tensor(order_).to(rows.device()); }
};

}  // namespace

at::Tensor attention_weights(const at::Tensor& scores, const at::Tensor& sinks) {
  if (!sinks.defined()) return at::softmax(scores, -1, at::kFloat).to(scores.scalar_type());
  auto shape = scores.sizes().vec();
  shape.back() = 1;
  const auto all = at::cat({scores, sinks.view({-1, 1, 1}).expand(shape)}, -1);
  const auto shifted = all - std::get<0>(all.max(-1, /*keepdim=*/true));
  return at::softmax(shifted, -1).narrow(-1, 0, scores.size(-1));
}

at::Tensor attention(const at::Tensor& query,
                     const at::Tensor& key,
                     const at::Tensor& value,
                     const std::vector<AttentionSegment>& all_segments,
                     const AttentionOptions& options) {
  // Sinks of fp32, or of heads that flash refuses, take the host's formula on a GPU.
  // Soft caps do everywhere.
  const bool refused = query.scalar_type() != at::kBFloat16 || query.size(2) % 8 != 0;
  if (query.is_cuda() && !(options.sinks.defined() && refused) && !options.softcap) {
    return attention_cuda(query, key, value, all_segments, options);
  }
  const auto segments = with_queries(all_segments);
  if (segments.empty())
    return at::zeros({query.size(0), query.size(1), value.size(2)}, query.options());
  const bool alone = options.alignment == Alignment::kBitwise && !is_host_float(query);
  const auto groups = group(segments, query.size(1), alone);
  RowsOfGroups query_rows;
  RowsOfGroups key_rows;
  for (const auto& alike : groups) {
    query_rows.add(alike.query_begins, alike.shape.num_queries);
    key_rows.add(alike.key_begins, alike.shape.num_keys);
  }
  const auto queries = query_rows.take(query);
  const auto keys = key_rows.take(key);
  const auto values = key_rows.take(value);
  std::vector<at::Tensor> parts;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const auto of_each = [count = groups[i].count()](const at::Tensor& rows) {
      return rows.unflatten(0, {count, -1});
    };
    parts.push_back(
        eager(of_each(queries[i]), of_each(keys[i]), of_each(values[i]), options).flatten(0, 1));
  }
  return query_rows.put(parts.size() == 1 ? parts[0] : at::cat(parts), query.size(0));
}

}  // namespace ferry::models
