#include "rollout/kernels/best_token.h"

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

// GCC 12 reports its own intrinsics where they are inlined (PR 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"

// Compiles a function's loops for the vector widths of several machines; the loader chooses.
#define FERRY_ANY_VECTORS __attribute__((target_clones("avx512f", "avx2", "default")))
#define FERRY_AVX512F __attribute__((target("avx512f")))

namespace ferry::rollout {
namespace {

constexpr std::size_t kChunk = kTokenChunk;
constexpr std::size_t kQuads = kChunk / 4;

using Floats = std::array<float, kChunk>;
using RandomBits = std::array<std::array<std::uint32_t, kQuads>, 4>;  // of token 4 i + k at [k][i]

float widen(float value) {
  return value;
}
float widen(std::uint16_t bf16) {
  return std::bit_cast<float>(std::uint32_t{bf16} << 16);
}

// Writes z, and returns the largest. It is found among integers of the same order, because the
// compiler makes vectors of their maxima but not of those of floats.
template <typename T>
[[gnu::always_inline]] inline float scale_any(const T* __restrict__ logits,
                                              float scale,
                                              Floats& __restrict__ z) {
  constexpr std::int32_t kAllButSign = 0x7FFFFFFF;
  std::int32_t most = std::numeric_limits<std::int32_t>::min();
  for (std::size_t i = 0; i < kChunk; ++i) {
    z[i] = usable(widen(logits[i])) * scale;
    const auto bits = std::bit_cast<std::int32_t>(z[i]);
    most = std::max(most, bits ^ (bits >> 31 & kAllButSign));
  }
  return std::bit_cast<float>(most ^ (most >> 31 & kAllButSign));
}
FERRY_ANY_VECTORS float scale_chunk(const float* logits, float scale, Floats& z) {
  return scale_any(logits, scale, z);
}
FERRY_ANY_VECTORS float scale_chunk(const std::uint16_t* logits, float scale, Floats& z) {
  return scale_any(logits, scale, z);
}

FERRY_ANY_VECTORS void fill_bits(const DrawRow& draw, std::uint32_t first_quad, RandomBits& bits) {
  for (std::uint32_t i = 0; i < kQuads; ++i) {
    const auto random =
        philox(draw_counter(draw.request, draw.position, first_quad + i), draw.seed);
    for (std::size_t k = 0; k < 4; ++k) bits[k][i] = random.at[k];
  }
}

FERRY_AVX512F inline __m512i all_lanes(std::uint32_t value) {
  return _mm512_set1_epi64(value);
}

// philox() of eight counters at a time, a number in the lower half of each lane. Products read the
// lower halves only, so the upper ones may hold anything. Takes a third of fill_bits()' time.
FERRY_AVX512F void fill_bits_avx512(const DrawRow& draw,
                                    std::uint32_t first_quad,
                                    RandomBits& bits) {
  constexpr std::uint32_t kLanes = 8;
  __m512i counters[kQuads / kLanes][4];
  for (std::uint32_t v = 0; v < kQuads / kLanes; ++v) {
    const auto first = draw_counter(draw.request, draw.position, first_quad + v * kLanes);
    for (int k = 0; k < 4; ++k) counters[v][k] = all_lanes(first.at[k]);
    counters[v][0] = _mm512_add_epi64(counters[v][0], _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0));
  }
  auto key0 = static_cast<std::uint32_t>(draw.seed);
  auto key1 = static_cast<std::uint32_t>(draw.seed >> 32);
  constexpr int kXorOfThree = 0x96;
  for (int round = 0; round < 10; ++round) {
    for (auto& c : counters) {
      const auto a = _mm512_mul_epu32(c[0], all_lanes(0xD2511F53));
      const auto b = _mm512_mul_epu32(c[2], all_lanes(0xCD9E8D57));
      c[0] =
          _mm512_ternarylogic_epi64(_mm512_srli_epi64(b, 32), c[1], all_lanes(key0), kXorOfThree);
      c[2] =
          _mm512_ternarylogic_epi64(_mm512_srli_epi64(a, 32), c[3], all_lanes(key1), kXorOfThree);
      c[1] = b;
      c[3] = a;
    }
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  for (std::size_t v = 0; v < kQuads / kLanes; ++v)
    for (std::size_t k = 0; k < 4; ++k)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(&bits[k][v * kLanes]),
                          _mm512_cvtepi64_epi32(counters[v][k]));
}

FERRY_ANY_VECTORS std::uint32_t smallest(const RandomBits& bits) {
  auto least = ~0U;
  for (const auto& of_quads : bits)
    for (const auto one : of_quads) least = std::min(least, one);
  return least;
}

FERRY_ANY_VECTORS void add_noise(const RandomBits& bits, Floats& z) {
  for (std::size_t k = 0; k < 4; ++k)
    for (std::size_t i = 0; i < kQuads; ++i) z[4 * i + k] += gumbel_noise(bits[k][i]);
}

// True if, with the smallest bits of a chunk, z + noise may be above `best`. Noise is -ln(-ln(1 -
// w)), w growing with the bits, and w <= -ln(1 - w): where it is at least x, w <= e^-x.
bool may_exceed(float best, float z, std::uint32_t bits) {
  const float roundings = 1e-3F + 1e-6F * std::abs(best);  // more than those of noise and sum
  const float least_noise = best - z - roundings;
  if (!(least_noise > 0)) return true;  // also if it is NaN
  constexpr float kTwoTo32 = 4294967296.0F;
  return static_cast<float>(bits) <= exp_of_negative(-least_noise) * (1.001F * kTwoTo32) + 8;
}

template <typename T>
BestToken find_best(
    const DrawRow& draw, const T* logits, float scale, std::int64_t first, std::int64_t end) {
  static const auto fill = __builtin_cpu_supports("avx512f") ? fill_bits_avx512 : fill_bits;
  const float most_noise = draw.greedy != 0 ? 0 : kMostNoise;
  BestToken best;
  std::array<T, kChunk> last{};
  alignas(64) Floats z;
  alignas(64) RandomBits bits;
  for (; first < end; first += kTokenChunk) {
    const auto count = static_cast<std::size_t>(std::min(end - first, kTokenChunk));
    const T* chunk = logits + first;
    if (count < kChunk) {
      last.fill(*chunk);
      chunk = std::copy_n(chunk, count, last.begin()) - count;
    }
    const float largest = scale_chunk(chunk, scale, z);
    if (best.token >= 0 && largest + most_noise <= best.sum) continue;
    if (draw.greedy == 0) {
      fill(draw, static_cast<std::uint32_t>(first / 4), bits);
      if (best.token >= 0 && !may_exceed(best.sum, largest, smallest(bits))) continue;
      add_noise(bits, z);
    }
    for (std::size_t i = 0; i < count; ++i) best.offer(z[i], first + static_cast<std::int64_t>(i));
  }
  return best;
}

}  // namespace

BestToken best_token(
    const DrawRow& draw, const float* logits, float scale, std::int64_t first, std::int64_t end) {
  return find_best(draw, logits, scale, first, end);
}

BestToken best_token(const DrawRow& draw,
                     const std::uint16_t* logits,
                     float scale,
                     std::int64_t first,
                     std::int64_t end) {
  return find_best(draw, logits, scale, first, end);
}

}  // namespace ferry::rollout
