// Sums of products of bf16 pairs on the host, in the order of oneDNN's kernels, for host_product.cc
// and paged_attention_host.cc. Only for machines with AVX512_BF16.
#pragma once

// GCC 12 reports this in its own intrinsics (PR 105593), at the place where they are inlined.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#define FERRY_AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))

namespace ferry::models::host {

using Half = std::uint16_t;  // the bits of a bf16

inline bool has_avx512_bf16() {
  static const bool has = __builtin_cpu_supports("avx512bf16") &&
                          __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  return has;
}

inline constexpr std::int64_t kColumns = 16;  // of a panel: rows of the weight
inline constexpr std::int64_t kTileRows = 8;  // of x, whose sums are kept in registers
inline constexpr std::int64_t kLongestBlock = 1024;
inline constexpr std::int64_t kPairs = kLongestBlock / 2;

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

// 32 channels, or `count` if that is fewer, of `columns` rows of the weight that lie `stride`
// apart, as pairs; zeros fill them up.
FERRY_AVX512_BF16 inline void load_pairs(const Half* weight,
                                         std::int64_t stride,
                                         std::int64_t columns,
                                         std::int64_t count,
                                         __m512i* pairs) {
  const auto mask =
      static_cast<__mmask32>(count >= 32 ? ~0U : (1U << static_cast<unsigned>(count)) - 1U);
  for (std::int64_t j = 0; j < kColumns; ++j) {
    pairs[j] =
        j < columns ? _mm512_maskz_loadu_epi16(mask, weight + j * stride) : _mm512_setzero_si512();
  }
  transpose(pairs);
}

// Packs `count` channels, an even number, of `columns` rows of the weight.
FERRY_AVX512_BF16 inline void pack(const Half* weight,
                                   std::int64_t stride,
                                   std::int64_t columns,
                                   std::int64_t count,
                                   Panel& panel) {
  for (std::int64_t k = 0; k < count; k += 32) {
    __m512i pairs[kColumns];
    load_pairs(weight + k, stride, columns, count - k, pairs);
    std::copy_n(pairs, kColumns, panel.of + k / 2);
  }
}

// sums[i] += the product of a block of row i and the panel. Meanwhile prefetches the block that is
// packed next, 16 rows that begin at `next` and lie `stride` apart.
template <int Rows>
FERRY_AVX512_BF16 inline void multiply(const Half* x,
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

// The same product for a few rows of x, with pairs that are used as they are loaded, without a
// packed panel.
template <int Rows>
FERRY_AVX512_BF16 inline void multiply_unpacked(const Half* x,
                                                std::int64_t stride,
                                                const Half* weight,
                                                std::int64_t columns,
                                                std::int64_t count,
                                                const Half* next,
                                                bool first,
                                                __m512* sums) {
  __m512 chains[Rows];
  for (auto& chain : chains) chain = _mm512_setzero_ps();
  for (std::int64_t k = 0; k < count; k += 32) {
    __m512i pairs[kColumns];
    load_pairs(weight + k, stride, columns, count - k, pairs);
    const auto num_pairs = std::min(kColumns, (count - k) / 2);
    for (std::int64_t p = 0; p < num_pairs; ++p) {
      if (next != nullptr)
        _mm_prefetch(reinterpret_cast<const char*>(next + p * stride + k), _MM_HINT_T1);
      for (int i = 0; i < Rows; ++i) {
        int pair = 0;
        std::memcpy(&pair, x + i * stride + k + 2 * p, sizeof pair);
        chains[i] =
            _mm512_dpbf16_ps(chains[i], (__m512bh)pairs[p], (__m512bh)_mm512_set1_epi32(pair));
      }
    }
  }
  for (int i = 0; i < Rows; ++i) sums[i] = first ? chains[i] : _mm512_add_ps(sums[i], chains[i]);
}

using Multiply =
    void (*)(const Half*, std::int64_t, const Panel&, std::int64_t, const Half*, bool, __m512*);
inline constexpr Multiply kMultiply[kTileRows]{multiply<1>, multiply<2>, multiply<3>, multiply<4>,
                                               multiply<5>, multiply<6>, multiply<7>, multiply<8>};
using MultiplyUnpacked = void (*)(
    const Half*, std::int64_t, const Half*, std::int64_t, std::int64_t, const Half*, bool, __m512*);
inline constexpr std::int64_t kMostUnpackedRows = 4;
inline constexpr MultiplyUnpacked kMultiplyUnpacked[kMostUnpackedRows]{
    multiply_unpacked<1>, multiply_unpacked<2>, multiply_unpacked<3>, multiply_unpacked<4>};

}  // namespace ferry::models::host
