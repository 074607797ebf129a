#include "models/kernels/attention/paged_attention_host.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>

#include "models/kernels/attention/segments.h"
#include "models/kernels/product/host_chains.h"

namespace ferry::models {
namespace {

using host::Half;
using host::kColumns;
using host::kLongestBlock;
using host::kTileRows;

constexpr Half kLeast = 0xff7f;  // of bf16

// One row of each sequence, [sequences, heads, ..], and the blocks of its keys.
struct Problem {
  const Half* query = nullptr;  // [sequences, heads, dim]
  const Half* key = nullptr;    // [blocks, block_size, groups, dim]
  const Half* value = nullptr;  // [blocks, block_size, groups, value_dim]
  const std::int32_t* tables = nullptr;
  const std::int32_t* lengths = nullptr;
  std::int64_t table_stride = 0;
  std::int64_t block_size = 0;
  std::int64_t groups = 0;
  std::int64_t heads_of_group = 0;
  std::int64_t dim = 0;
  std::int64_t value_dim = 0;
  std::int64_t width = 0;   // of a row of scores
  std::int64_t window = 0;  // 0: none
  float scale = 1;

  std::int64_t heads() const { return groups * heads_of_group; }
  // The keys or the values of one token and group.
  const Half* at(const Half* cache,
                 std::int64_t sequence,
                 std::int64_t group,
                 std::int64_t position,
                 std::int64_t channels) const {
    const auto block = tables[sequence * table_stride + position / block_size];
    return cache + ((block * block_size + position % block_size) * groups + group) * channels;
  }
};

FERRY_AVX512_BF16 inline __m512 widened(__m256i halves) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

// scores [sequences, heads, width]: the products, rounded, then scaled and rounded again.
FERRY_AVX512_BF16 void score(const Problem& p,
                             std::int64_t sequence,
                             std::int64_t group,
                             Half* scores) {
  alignas(64) thread_local host::Panel panel;
  const std::int64_t length = p.lengths[sequence];
  const auto first_seen = p.window > 0 ? std::max<std::int64_t>(0, length - p.window) : 0;
  const auto row = sequence * p.heads() + group * p.heads_of_group;
  const auto scale = _mm512_set1_ps(p.scale);
  const auto least = _mm256_set1_epi16(static_cast<short>(kLeast));
  for (std::int64_t begin = 0; begin < p.width; begin += kColumns) {
    __m512 sums[kTileRows];
    const auto count = std::clamp<std::int64_t>(length - begin, 0, kColumns);
    const auto hidden = std::clamp<std::int64_t>(first_seen - begin, 0, kColumns);
    const auto seen = static_cast<__mmask16>(((1U << static_cast<unsigned>(count)) - 1U) &
                                             ~((1U << static_cast<unsigned>(hidden)) - 1U));
    if (count > 0)
      host::pack(p.at(p.key, sequence, group, begin, p.dim), p.groups * p.dim, count, p.dim, panel);
    for (std::int64_t head = 0; head < p.heads_of_group; head += kTileRows) {
      const auto tile = std::min(kTileRows, p.heads_of_group - head);
      if (count > 0)
        host::kMultiply[tile - 1](p.query + (row + head) * p.dim, p.dim, panel, p.dim / 2, nullptr,
                                  true, sums);
      for (std::int64_t i = 0; i < tile; ++i) {
        auto result = least;
        if (count > 0) {
          const auto rounded = widened((__m256i)_mm512_cvtneps_pbh(sums[i]));
          result = _mm256_mask_mov_epi16(
              least, seen, (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(rounded, scale)));
        }
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(scores + (row + head + i) * p.width + begin),
                            result);
      }
    }
  }
}

// Sums of 16 channels over the keys, each weighted: weights [sequences, heads, width].
template <int Rows>
FERRY_AVX512_BF16 void sum_values(const Problem& p,
                                  std::int64_t sequence,
                                  std::int64_t group,
                                  std::int64_t channel,
                                  __mmask16 mask,
                                  const Half* weights,
                                  __m512* sums) {
  const std::int64_t length = p.lengths[sequence];
  const auto stride = p.groups * p.value_dim;
  for (std::int64_t begin = 0; begin < length; begin += kLongestBlock) {
    __m512 chains[Rows];
    for (auto& chain : chains) chain = _mm512_setzero_ps();
    const auto end = std::min(length, begin + kLongestBlock);
    for (auto position = begin; position < end; position += 2) {
      const auto* const value = p.at(p.value, sequence, group, position, p.value_dim) + channel;
      const auto even = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, value));
      const auto odd = position + 1 < end
                           ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, value + stride))
                           : _mm512_setzero_si512();
      const auto pairs = (__m512bh)_mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
      for (int i = 0; i < Rows; ++i) {
        int pair = 0;
        std::memcpy(&pair, weights + i * p.width + position, sizeof pair);
        chains[i] = _mm512_dpbf16_ps(chains[i], pairs, (__m512bh)_mm512_set1_epi32(pair));
      }
    }
    for (int i = 0; i < Rows; ++i)
      sums[i] = begin == 0 ? chains[i] : _mm512_add_ps(sums[i], chains[i]);
  }
}

using SumValues = void (*)(
    const Problem&, std::int64_t, std::int64_t, std::int64_t, __mmask16, const Half*, __m512*);
constexpr SumValues kSumValues[kTileRows]{sum_values<1>, sum_values<2>, sum_values<3>,
                                          sum_values<4>, sum_values<5>, sum_values<6>,
                                          sum_values<7>, sum_values<8>};

FERRY_AVX512_BF16 void attend(const Problem& p,
                              std::int64_t sequence,
                              std::int64_t group,
                              const Half* weights,
                              Half* result) {
  const auto row = sequence * p.heads() + group * p.heads_of_group;
  for (std::int64_t channel = 0; channel < p.value_dim; channel += kColumns) {
    const auto count = std::min(kColumns, p.value_dim - channel);
    const auto mask = static_cast<__mmask16>((1U << static_cast<unsigned>(count)) - 1U);
    for (std::int64_t head = 0; head < p.heads_of_group; head += kTileRows) {
      const auto tile = std::min(kTileRows, p.heads_of_group - head);
      __m512 sums[kTileRows];
      kSumValues[tile - 1](p, sequence, group, channel, mask, weights + (row + head) * p.width,
                           sums);
      for (std::int64_t i = 0; i < tile; ++i)
        _mm256_mask_storeu_epi16(result + (row + head + i) * p.value_dim + channel, mask,
                                 (__m256i)_mm512_cvtneps_pbh(sums[i]));
    }
  }
}

const Half* half_bits_of(const at::Tensor& tensor) {
  return static_cast<const Half*>(tensor.const_data_ptr());
}

at::Tensor compute(const at::Tensor& query,
                   const PagedKeys& keys,
                   const AttentionOptions& options) {
  const auto sequences = query.size(0);
  const auto* const lengths = keys.lengths.const_data_ptr<std::int32_t>();
  const std::int64_t longest = *std::max_element(lengths, lengths + sequences);
  const Problem problem{.query = half_bits_of(query),
                        .key = half_bits_of(keys.key),
                        .value = half_bits_of(keys.value),
                        .tables = keys.block_tables.const_data_ptr<std::int32_t>(),
                        .lengths = lengths,
                        .table_stride = keys.block_tables.stride(0),
                        .block_size = keys.key.size(1),
                        .groups = keys.key.size(2),
                        .heads_of_group = query.size(1) / keys.key.size(2),
                        .dim = query.size(2),
                        .value_dim = keys.value.size(3),
                        .width = round_up(longest, kHostAttentionRows),
                        .window = options.window.value_or(0),
                        .scale = static_cast<float>(options.scale)};
  const auto for_each = [&](const auto& body) {
    at::parallel_for(0, sequences * problem.groups, 1, [&](std::int64_t begin, std::int64_t end) {
      for (auto i = begin; i < end; ++i) body(i / problem.groups, i % problem.groups);
    });
  };
  auto scores = at::empty({sequences, query.size(1), problem.width}, query.options());
  for_each([&](std::int64_t sequence, std::int64_t group) {
    score(problem, sequence, group, static_cast<Half*>(scores.mutable_data_ptr()));
  });
  const auto weights = attention_weights(scores.unsqueeze(2), options.sinks).contiguous();
  auto result = at::empty({sequences, query.size(1), problem.value_dim}, query.options());
  for_each([&](std::int64_t sequence, std::int64_t group) {
    attend(problem, sequence, group, half_bits_of(weights),
           static_cast<Half*>(result.mutable_data_ptr()));
  });
  return result;
}

// Numbers without a pattern in [-1, 1], the same at every call.
at::Tensor noise(at::IntArrayRef shape, double step) {
  return (at::arange(c10::multiply_integers(shape), at::kDouble) * step)
      .sin()
      .to(at::kBFloat16)
      .view(shape);
}

// Appends the negated tensor along a dimension: sums over it are zero but for roundings.
at::Tensor with_negative(const at::Tensor& half, std::int64_t dim) {
  return at::cat({half, -half}, dim);
}

struct Heads {
  std::int64_t heads = 0;
  std::int64_t groups = 0;
  std::int64_t dim = 0;
  std::int64_t value_dim = 0;
  auto operator<=>(const Heads&) const = default;
};

// True if sequences of many lengths, one behind another, get the bits that attention() gives them.
bool agrees(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, double scale) {
  const auto block = key.size(0);  // of one sequence, which is a block
  for (const std::int64_t length :
       {std::int64_t{1}, std::int64_t{17}, block / 4, block / 2 + 30, block}) {
    const AttentionOptions options{.scale = scale, .alignment = Alignment::kBitwise};
    const auto lengths = at::full({1}, length, at::kInt);
    const auto mine = compute(query,
                              {.key = key.unsqueeze(0),
                               .value = value.unsqueeze(0),
                               .block_tables = at::zeros({1, 1}, at::kInt),
                               .lengths = lengths},
                              options);
    const auto theirs = attention(query, key.narrow(0, 0, length), value.narrow(0, 0, length),
                                  {{.num_queries = 1, .num_keys = length}}, options);
    if (!at::equal(mine.view(at::kShort), theirs.contiguous().view(at::kShort))) return false;
  }
  return true;
}

class HostAttentionKernels {
 public:
  static HostAttentionKernels& of_process() {
    static HostAttentionKernels kernels;
    return kernels;
  }

  bool has(const Heads& heads) {
    const std::lock_guard lock(mutex_);
    if (const auto found = known_.find(heads); found != known_.end()) return found->second;
    return known_.emplace(heads, measure(heads)).first->second;
  }

 private:
  static bool measure(const Heads& heads) {
    constexpr std::int64_t kKeys = 2 * kLongestBlock + 64;
    const auto [num_heads, groups, dim, value_dim] = heads;
    const auto query = noise({1, num_heads, dim / 2}, 12.9898);
    const auto key = noise({kKeys, groups, dim / 2}, 78.233);
    const auto value = noise({kKeys / 2, groups, value_dim}, 37.719);
    // Equal weights of values that cancel, then products that cancel, made large.
    return agrees(at::zeros({1, num_heads, dim}, at::kBFloat16), at::cat({key, key}, 2),
                  with_negative(value, 0), 1) &&
           agrees(at::cat({query, query}, 2), with_negative(key, 2),
                  noise({kKeys, groups, value_dim}, 37.719), 1 << 20);
  }

  std::mutex mutex_;
  std::map<Heads, bool> known_;
};

}  // namespace

at::Tensor paged_attention_host(const at::Tensor& query,
                                const PagedKeys& keys,
                                const AttentionOptions& options) {
  const auto is_bf16 = [](const at::Tensor& x) {
    return x.device().is_cpu() && x.scalar_type() == at::kBFloat16;
  };
  const bool fits = host::has_avx512_bf16() && is_bf16(query) && is_bf16(keys.key) &&
                    is_bf16(keys.value) && keys.key.is_contiguous() && keys.value.is_contiguous() &&
                    query.size(2) % 4 == 0 && query.size(0) > 0 && !options.softcap &&
                    keys.key.size(1) % kColumns == 0 && keys.block_tables.stride(1) == 1;
  const Heads heads{.heads = query.size(1),
                    .groups = keys.key.size(2),
                    .dim = query.size(2),
                    .value_dim = keys.value.size(3)};
  if (!fits || heads.dim > kLongestBlock / 2 || !HostAttentionKernels::of_process().has(heads))
    return {};
  return compute(query.contiguous(), keys, options);
}

}  // namespace ferry::models
