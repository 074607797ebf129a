#include "models/kernels/product/float_chains.h"

#include <immintrin.h>

#include <algorithm>

#define FERRY_AVX2 __attribute__((target("avx2,fma")))
// Without FMA, which no compiler can make of a product and a sum then.
#define FERRY_AVX2_ALONE __attribute__((target("avx2")))

namespace ferry::models::host {
namespace {

constexpr std::int64_t kWidth = 16;  // of a panel of b: columns
constexpr int kMostRows = 6;         // whose sums of a panel are kept in registers

struct FloatPanel {
  float of[kLongestChain][kWidth];
};

// Transposes 8 x 8.
FERRY_AVX2 inline void transpose(__m256* rows) {
  __m256 a[8];
  for (std::int64_t i = 0; i < 4; ++i) {
    a[2 * i] = _mm256_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
    a[2 * i + 1] = _mm256_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
  }
  __m256 b[8];
  for (std::int64_t i = 0; i < 2; ++i) {
    b[4 * i] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0x44);
    b[4 * i + 1] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0xee);
    b[4 * i + 2] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0x44);
    b[4 * i + 3] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0xee);
  }
  for (std::int64_t i = 0; i < 4; ++i) {
    rows[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
    rows[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
  }
}

// `count` terms of up to 16 columns; zeros fill the panel up.
FERRY_AVX2 void pack(const FloatMatrices& m,
                     std::int64_t begin,
                     std::int64_t count,
                     std::int64_t column,
                     std::int64_t columns,
                     FloatPanel& panel) {
  const auto* const b = m.b + begin * m.b_k + column * m.b_column;
  std::int64_t packed = 0;
  if (columns == kWidth && m.b_column == 1) {
    for (; packed < count; ++packed) {
      for (const std::int64_t j : {0, 8})
        _mm256_storeu_ps(panel.of[packed] + j, _mm256_loadu_ps(b + packed * m.b_k + j));
    }
  } else if (columns == kWidth && m.b_k == 1) {
    for (; packed + 8 <= count; packed += 8) {
      for (const std::int64_t j : {0, 8}) {
        __m256 eight[8];
        for (std::int64_t i = 0; i < 8; ++i)
          eight[i] = _mm256_loadu_ps(b + (j + i) * m.b_column + packed);
        transpose(eight);
        for (std::int64_t i = 0; i < 8; ++i) _mm256_storeu_ps(panel.of[packed + i] + j, eight[i]);
      }
    }
  }
  for (; packed < count; ++packed) {
    for (std::int64_t j = 0; j < kWidth; ++j)
      panel.of[packed][j] = j < columns ? b[packed * m.b_k + j * m.b_column] : 0.0F;
  }
}

// Sums of 16 elements of each of some rows. They are no array, which the compiler would keep in
// memory.
template <int Rows>
struct Sums {
  __m256 left, right;
  Sums<Rows - 1> others;
};
template <>
struct Sums<0> {};

template <int Rows>
FERRY_AVX2 inline void clear(Sums<Rows>& sums) {
  sums.left = sums.right = _mm256_setzero_ps();
  if constexpr (Rows > 1) clear<Rows - 1>(sums.others);
}

template <int Rows>
FERRY_AVX2 inline void add_terms(
    const float* a, std::int64_t a_row, __m256 left, __m256 right, Sums<Rows>& sums) {
  const auto value = _mm256_broadcast_ss(a);
  sums.left = _mm256_fmadd_ps(value, left, sums.left);
  sums.right = _mm256_fmadd_ps(value, right, sums.right);
  if constexpr (Rows > 1) add_terms<Rows - 1>(a + a_row, a_row, left, right, sums.others);
}

template <int Rows>
FERRY_AVX2 inline void store(const Sums<Rows>& sums, float (*to)[kWidth]) {
  _mm256_storeu_ps(*to, sums.left);
  _mm256_storeu_ps(*to + 8, sums.right);
  if constexpr (Rows > 1) store<Rows - 1>(sums.others, to + 1);
}

// A chain of `count` terms of each of Rows x 16 elements.
template <int Rows>
FERRY_AVX2 void add_chain(const float* a,
                          std::int64_t a_row,
                          std::int64_t a_k,
                          const FloatPanel& panel,
                          std::int64_t count,
                          float (*results)[kWidth]) {
  Sums<Rows> sums;
  clear<Rows>(sums);
  for (std::int64_t p = 0; p < count; ++p) {
    add_terms<Rows>(a + p * a_k, a_row, _mm256_loadu_ps(panel.of[p]),
                    _mm256_loadu_ps(panel.of[p] + 8), sums);
  }
  store<Rows>(sums, results);
}

using AddChain = void (*)(
    const float*, std::int64_t, std::int64_t, const FloatPanel&, std::int64_t, float (*)[kWidth]);
constexpr AddChain kAddChain[kMostRows]{add_chain<1>, add_chain<2>, add_chain<3>,
                                        add_chain<4>, add_chain<5>, add_chain<6>};

// The mask of the columns that exist among 8, from column `offset` of the 16 on.
FERRY_AVX2 inline __m256i columns_of(std::int64_t columns, int offset) {
  const auto lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(columns) - offset), lanes);
}

// Rows of one panel, `count` terms from `begin` on.
FERRY_AVX2 void multiply_panel(const FloatMatrices& m,
                               const FloatTile& tile,
                               std::int64_t begin,
                               std::int64_t count,
                               std::int64_t column,
                               const FloatPanel& panel) {
  const auto columns = std::min(kWidth, tile.column + tile.columns - column);
  const __m256i masks[2]{columns_of(columns, 0), columns_of(columns, 8)};
  for (std::int64_t row = 0; row < tile.rows; row += kMostRows) {
    const auto rows = std::min<std::int64_t>(kMostRows, tile.rows - row);
    const auto first = tile.row + row;
    alignas(32) float sums[kMostRows][kWidth];
    kAddChain[rows - 1](m.a + first * m.a_row + begin * m.a_k, m.a_row, m.a_k, panel, count, sums);
    for (std::int64_t i = 0; i < rows; ++i) {
      auto* const c = m.c + (first + i) * m.c_row + column;
      for (std::int64_t half = 0; half < 2; ++half) {
        const auto* const before =
            begin > 0 ? c + 8 * half : (m.bias != nullptr ? m.bias + column + 8 * half : nullptr);
        auto sum = _mm256_load_ps(sums[i] + 8 * half);
        if (before != nullptr) sum = _mm256_add_ps(_mm256_maskload_ps(before, masks[half]), sum);
        _mm256_maskstore_ps(c + 8 * half, masks[half], sum);
      }
    }
  }
}

}  // namespace

bool has_avx2_and_fma() {
  static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return has;
}

FERRY_AVX2 void multiply_chains(const FloatMatrices& matrices, const FloatTile& tile) {
  alignas(64) thread_local FloatPanel panel;
  for (std::int64_t begin = 0; begin < matrices.k; begin += matrices.chain) {
    const auto count = std::min(matrices.chain, matrices.k - begin);
    for (auto column = tile.column; column < tile.column + tile.columns; column += kWidth) {
      pack(matrices, begin, count, column, std::min(kWidth, tile.column + tile.columns - column),
           panel);
      multiply_panel(matrices, tile, begin, count, column, panel);
    }
  }
}

void multiply_lanes(const FloatMatrices& m, const FloatTile& tile) {
  const auto whole = m.k / 4 * 4;
  for (auto row = tile.row; row < tile.row + tile.rows; ++row) {
    const auto* const a = m.a + row * m.a_row;
    for (auto column = tile.column; column < tile.column + tile.columns; ++column) {
      const auto* const b = m.b + column * m.b_column;
      auto lanes = _mm_setzero_ps();
      for (std::int64_t p = 0; p < whole; p += 4)
        lanes = _mm_add_ps(lanes, _mm_mul_ps(_mm_loadu_ps(a + p), _mm_loadu_ps(b + p)));
      alignas(16) float sums[4];
      _mm_store_ps(sums, lanes);
      auto sum = (sums[0] + sums[2]) + (sums[1] + sums[3]);
      for (auto p = whole; p < m.k; ++p) sum += a[p] * b[p];
      m.c[row * m.c_row + column] = m.bias == nullptr ? sum : sum + m.bias[column];
    }
  }
}

namespace {

// Solves row i of `panel`, in which those before it are.
FERRY_AVX2 void solve_row(const UnitTriangle& t, std::int64_t i, FloatPanel& panel) {
  const auto* const l = t.l + i * t.l_row;
  const auto own = i / t.block * t.block;
  for (const std::int64_t half : {0, 8}) {
    auto sum = _mm256_setzero_ps();
    for (std::int64_t j = 0; j < own; ++j)
      sum = _mm256_fmadd_ps(_mm256_set1_ps(l[j * t.l_column]), _mm256_load_ps(panel.of[j] + half),
                            sum);
    auto left = _mm256_sub_ps(_mm256_load_ps(panel.of[i] + half), sum);
    for (auto j = own; j < i; ++j)
      left = _mm256_fnmadd_ps(_mm256_set1_ps(l[j * t.l_column]), _mm256_load_ps(panel.of[j] + half),
                              left);
    _mm256_store_ps(panel.of[i] + half, left);
  }
}

FERRY_AVX2_ALONE inline __m256 product(float l, const float* x) {
  return _mm256_mul_ps(_mm256_set1_ps(l), _mm256_load_ps(x));
}

FERRY_AVX2_ALONE void solve_row_in_lanes(const UnitTriangle& t, std::int64_t i, FloatPanel& panel) {
  const auto* const l = t.l + i * t.l_row;
  for (const std::int64_t half : {0, 8}) {
    const auto zero = _mm256_setzero_ps();
    __m256 lanes[4] = {zero, zero, zero, zero};
    std::int64_t j = 0;
    for (; j + 4 <= i; j += 4) {
      for (std::int64_t lane = 0; lane < 4; ++lane)
        lanes[lane] = _mm256_add_ps(lanes[lane],
                                    product(l[(j + lane) * t.l_column], panel.of[j + lane] + half));
    }
    auto sum = _mm256_add_ps(_mm256_add_ps(lanes[0], lanes[2]), _mm256_add_ps(lanes[1], lanes[3]));
    for (; j < i; ++j) sum = _mm256_add_ps(sum, product(l[j * t.l_column], panel.of[j] + half));
    _mm256_store_ps(panel.of[i] + half, _mm256_sub_ps(_mm256_load_ps(panel.of[i] + half), sum));
  }
}

}  // namespace

void solve_triangle(const UnitTriangle& t) {
  alignas(64) thread_local FloatPanel panel;
  const auto solve = t.in_lanes ? solve_row_in_lanes : solve_row;
  for (std::int64_t column = 0; column < t.columns; column += kWidth) {
    const auto columns = std::min(kWidth, t.columns - column);
    for (std::int64_t i = 0; i < t.rows; ++i) {
      auto* const row = panel.of[i];
      auto* const x = t.x + i * t.x_row + column;
      std::fill(std::copy_n(x, columns, row), row + kWidth, 0.0F);
      solve(t, i, panel);
      std::copy_n(row, columns, x);
    }
  }
}

}  // namespace ferry::models::host
