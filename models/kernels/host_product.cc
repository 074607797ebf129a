#include "models/kernels/host_product.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in the header of GCC 12: PR 105593
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <tuple>

namespace ferry::models {
namespace {

#define FERRY_AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))

using Half = std::uint16_t;  // the bits of a bf16

constexpr std::int64_t kColumns = 16;  // of a panel: rows of the weight
constexpr std::int64_t kTileRows = 8;  // of x, whose sums are kept in registers
constexpr std::int64_t kLongestBlock = 1024;
constexpr std::int64_t kPairs = kLongestBlock / 2;

// Pairs of neighbours along K of 16 rows of the weight: [pairs][16].
struct Panel {
  __m512i of[kPairs];
};

// Transposes 16 x 16 words.
FERRY_AVX512_BF16 inline void transpose(__m512i* rows) {
  __m512i a[16];
  for (int i = 0; i < 8; ++i) {
    a[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
    a[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
  }
  __m512i b[16];
  for (int i = 0; i < 4; ++i) {
    b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
    b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    const auto low0 = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88);
    const auto low1 = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88);
    const auto high0 = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xdd);
    const auto high1 = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xdd);
    rows[i] = _mm512_shuffle_i32x4(low0, low1, 0x88);
    rows[i + 8] = _mm512_shuffle_i32x4(low0, low1, 0xdd);
    rows[i + 4] = _mm512_shuffle_i32x4(high0, high1, 0x88);
    rows[i + 12] = _mm512_shuffle_i32x4(high0, high1, 0xdd);
  }
}

// `count` channels, an even number, of `columns` rows of the weight that lie `stride` apart; zeros
// fill it up to whole vectors.
FERRY_AVX512_BF16 void pack(const Half* weight,
                            std::int64_t stride,
                            std::int64_t columns,
                            std::int64_t count,
                            Panel& panel) {
  for (std::int64_t k = 0; k < count; k += 32) {
    const auto mask = static_cast<__mmask32>(
        count - k >= 32 ? ~0U : (1U << static_cast<unsigned>(count - k)) - 1U);
    __m512i rows[kColumns];
    for (std::int64_t j = 0; j < kColumns; ++j) {
      rows[j] = j < columns ? _mm512_maskz_loadu_epi16(mask, weight + j * stride + k)
                            : _mm512_setzero_si512();
    }
    transpose(rows);
    std::copy_n(rows, kColumns, panel.of + k / 2);
  }
}

// sums[i] += the product of a block of row i and the panel. Meanwhile what is packed next, 16 rows
// that begin at `next` and lie `stride` apart, comes out of memory.
template <int Rows>
FERRY_AVX512_BF16 void multiply(const Half* x,
                                std::int64_t stride,
                                const Panel& panel,
                                std::int64_t pairs,
                                const Half* next,
                                bool first,
                                __m512* sums) {
  __m512 chains[Rows];
  for (auto& chain : chains) chain = _mm512_setzero_ps();
  for (std::int64_t p = 0; p < pairs; ++p) {
    if (next != nullptr) {
      const auto* const line = next + (p % kColumns) * stride + p / kColumns * 32;
      _mm_prefetch(reinterpret_cast<const char*>(line), _MM_HINT_T1);
    }
    const auto weights = (__m512bh)panel.of[p];
    for (int i = 0; i < Rows; ++i) {
      int pair = 0;
      std::memcpy(&pair, x + i * stride + 2 * p, sizeof pair);
      chains[i] = _mm512_dpbf16_ps(chains[i], weights, (__m512bh)_mm512_set1_epi32(pair));
    }
  }
  for (int i = 0; i < Rows; ++i) sums[i] = first ? chains[i] : _mm512_add_ps(sums[i], chains[i]);
}

using Multiply =
    void (*)(const Half*, std::int64_t, const Panel&, std::int64_t, const Half*, bool, __m512*);
constexpr Multiply kMultiply[kTileRows]{multiply<1>, multiply<2>, multiply<3>, multiply<4>,
                                        multiply<5>, multiply<6>, multiply<7>, multiply<8>};

struct Product {
  const Half* x = nullptr;       // [rows, k]
  const Half* weight = nullptr;  // [n, k]
  const Half* bias = nullptr;    // [n], or null
  Half* y = nullptr;             // [rows, n]
  std::int64_t rows = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  std::int64_t block = 0;  // of k
};

// The columns of one panel.
FERRY_AVX512_BF16 void multiply_panel(const Product& product, std::int64_t column) {
  alignas(64) thread_local Panel panel;
  __m512 sums[kMostHostProductRows];
  const auto columns = std::min(kColumns, product.n - column);
  for (std::int64_t begin = 0; begin < product.k; begin += product.block) {
    const auto count = std::min(product.block, product.k - begin);
    const auto* const weight = product.weight + column * product.k + begin;
    pack(weight, product.k, columns, count, panel);
    const auto* const next =
        column + 2 * kColumns <= product.n ? weight + kColumns * product.k : nullptr;
    for (std::int64_t row = 0; row < product.rows; row += kTileRows) {
      const auto tile = std::min(kTileRows, product.rows - row);
      kMultiply[tile - 1](product.x + row * product.k + begin, product.k, panel, count / 2,
                          row == 0 ? next : nullptr, begin == 0, sums + row);
    }
  }
  const auto mask = static_cast<__mmask16>((1U << static_cast<unsigned>(columns)) - 1U);
  auto bias = _mm512_setzero_ps();
  if (product.bias != nullptr) {
    const auto bits = _mm256_maskz_loadu_epi16(mask, product.bias + column);
    bias = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  for (std::int64_t row = 0; row < product.rows; ++row) {
    const auto sum = product.bias == nullptr ? sums[row] : _mm512_add_ps(sums[row], bias);
    _mm256_mask_storeu_epi16(product.y + row * product.n + column, mask,
                             (__m256i)_mm512_cvtneps_pbh(sum));
  }
}

const Half* bits_of(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<const Half*>(tensor.const_data_ptr()) : nullptr;
}

at::Tensor multiply_all(const at::Tensor& x,
                        const at::Tensor& weight,
                        const at::Tensor& bias,
                        std::int64_t block) {
  auto y = at::empty({x.size(0), weight.size(0)}, x.options());
  const Product product{.x = bits_of(x),
                        .weight = bits_of(weight),
                        .bias = bits_of(bias),
                        .y = static_cast<Half*>(y.mutable_data_ptr()),
                        .rows = x.size(0),
                        .n = weight.size(0),
                        .k = weight.size(1),
                        .block = block};
  const auto panels = (product.n + kColumns - 1) / kColumns;
  at::parallel_for(0, panels, 4, [&](std::int64_t begin, std::int64_t end) {
    for (auto panel = begin; panel < end; ++panel) multiply_panel(product, panel * kColumns);
  });
  return y;
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return at::equal(a.view(at::kShort), b.view(at::kShort));
}

// Rows whose products with the rows of a weight are zero but for roundings.
struct Cancelling {
  at::Tensor x{}, weight{};
};
Cancelling cancelling(std::int64_t n, std::int64_t k, const at::TensorOptions& options) {
  const auto half = k / 2;
  // Multiples of numbers without pattern, the same at every call.
  const auto noise = [&](std::int64_t rows, double step) {
    const auto index = at::arange(rows * half, at::kDouble).view({rows, half});
    return (index * step).sin().to(options);
  };
  const auto x = noise(16, 12.9898);
  const auto weight = noise(n, 78.233);
  return {
      .x = at::cat({x, x, at::zeros({16, k - 2 * half}, options)}, 1).contiguous(),
      .weight = at::cat({weight, -weight, at::zeros({n, k - 2 * half}, options)}, 1).contiguous()};
}

// The blocks of K that at::linear adds up for a shape, measured once; nothing if it is none of
// these.
class Blocks {
 public:
  static Blocks& of_process() {
    static Blocks blocks;
    return blocks;
  }

  std::optional<std::int64_t> find(const at::Tensor& weight, const at::Tensor& bias) {
    const std::tuple key{weight.size(0), weight.size(1), bias.defined(), at::get_num_threads()};
    const std::lock_guard lock(mutex_);
    if (const auto found = known_.find(key); found != known_.end()) return found->second;
    return known_.emplace(key, measure(weight, bias)).first->second;
  }

 private:
  static std::optional<std::int64_t> measure(const at::Tensor& weight, const at::Tensor& bias) {
    constexpr std::int64_t kMostColumns = 4096;
    const auto k = weight.size(1);
    const auto [x, zeros] = cancelling(std::min(weight.size(0), kMostColumns), k, weight.options());
    const auto expected = at::linear(x, zeros);
    const auto added = bias.defined() ? std::optional(bias) : std::nullopt;
    for (const std::int64_t block : {kLongestBlock, kLongestBlock / 2}) {
      if (same_bits(multiply_all(x, zeros, {}, block), expected) &&
          same_bits(multiply_all(x, weight, bias, block), at::linear(x, weight, added)))
        return block;
    }
    return std::nullopt;
  }

  std::mutex mutex_;
  std::map<std::tuple<std::int64_t, std::int64_t, bool, int>, std::optional<std::int64_t>> known_;
};

bool has_instructions() {
  static const bool has = __builtin_cpu_supports("avx512bf16") &&
                          __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  return has;
}

}  // namespace

at::Tensor host_product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const bool fits = has_instructions() && x.device().is_cpu() && x.dim() == 2 &&
                    x.scalar_type() == at::kBFloat16 && weight.scalar_type() == at::kBFloat16 &&
                    weight.is_contiguous() && x.size(0) > 0 && x.size(0) <= kMostHostProductRows &&
                    x.size(1) % 2 == 0 && (!bias.defined() || bias.scalar_type() == at::kBFloat16);
  if (!fits) return {};
  const auto own_bias = bias.defined() ? bias.contiguous() : bias;
  const auto block = Blocks::of_process().find(weight, own_bias);
  if (!block) return {};
  return multiply_all(x.contiguous(), weight, own_bias, *block);
}

}  // namespace ferry::models
