#include "distckpt/elements/crc32.h"

#include <zlib.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include <cstring>

namespace ferry::distckpt {
namespace {

// fold() takes whole blocks on a processor with the instructions for it; `crc` is inverted before
// and after. The rest is zlib's.
constexpr std::size_t kNone = 0;

#if defined(__x86_64__)

// Folds by carry-less products, then reduces (V. Gopal et al., "Fast CRC Computation for Generic
// Polynomials Using PCLMULQDQ Instruction", Intel 2009; the reflected polynomial of zip).

// x^n modulo the polynomial, reflected and shifted as that paper's constants are.
constexpr std::int64_t power_of_x(int n) {
  std::uint32_t remainder = 0x80000000;  // reflected: x^0
  for (int i = 0; i < n; ++i) remainder = (remainder >> 1) ^ ((remainder & 1) * 0xedb88320);
  return std::int64_t{remainder} << 1;
}
static_assert(power_of_x(4 * 128 + 32) == 0x154442bd4);

// The factors that carry 16 bytes over a distance.
[[gnu::target("sse4.1")]] __m128i factors(int bytes) {
  switch (bytes) {
    case 256:
      return _mm_set_epi64x(power_of_x(2048 - 32), power_of_x(2048 + 32));
    case 64:
      return _mm_set_epi64x(power_of_x(512 - 32), power_of_x(512 + 32));
    default:
      return _mm_set_epi64x(power_of_x(128 - 32), power_of_x(128 + 32));
  }
}

[[gnu::target("sse4.1")]] inline __m128i load(const unsigned char* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}

[[gnu::target("pclmul,sse4.1")]] inline __m128i carry(__m128i value, __m128i by, __m128i next) {
  return _mm_xor_si128(
      _mm_xor_si128(_mm_clmulepi64_si128(value, by, 0x00), _mm_clmulepi64_si128(value, by, 0x11)),
      next);
}

// The 16 bytes that stand for the first blocks, of which it takes as many as it can.
struct Folded {
  __m128i state;
  const unsigned char* at;
  std::size_t size;  // left
};

[[gnu::target("pclmul,sse4.1")]] Folded fold_64(const unsigned char* at,
                                                std::size_t size,
                                                std::uint32_t crc) {
  const auto by = factors(64);
  const auto by_16 = factors(16);
  auto a = _mm_xor_si128(load(at), _mm_cvtsi32_si128(static_cast<int>(crc)));
  auto b = load(at + 16);
  auto c = load(at + 32);
  auto d = load(at + 48);
  for (at += 64, size -= 64; size >= 64; at += 64, size -= 64) {
    a = carry(a, by, load(at));
    b = carry(b, by, load(at + 16));
    c = carry(c, by, load(at + 32));
    d = carry(d, by, load(at + 48));
  }
  return {carry(carry(carry(a, by_16, b), by_16, c), by_16, d), at, size};
}

[[gnu::target("vpclmulqdq,avx512f")]] inline __m512i load_wide(const unsigned char* from) {
  return _mm512_loadu_si512(from);
}

[[gnu::target("vpclmulqdq,avx512f")]] inline __m512i carry_wide(__m512i value,
                                                                __m512i by,
                                                                __m512i next) {
  constexpr int kXorOfThree = 0x96;
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(value, by, 0x00),
                                   _mm512_clmulepi64_epi128(value, by, 0x11), next, kXorOfThree);
}

[[gnu::target("pclmul,sse4.1,vpclmulqdq,avx512f")]] Folded fold_256(const unsigned char* at,
                                                                    std::size_t size,
                                                                    std::uint32_t crc) {
  constexpr __mmask16 kAll = 0xffff;
  const auto by = _mm512_maskz_broadcast_i32x4(kAll, factors(256));
  const auto by_64 = _mm512_maskz_broadcast_i32x4(kAll, factors(64));
  const auto by_16 = factors(16);
  auto a = _mm512_xor_si512(load_wide(at),
                            _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(crc))));
  auto b = load_wide(at + 64);
  auto c = load_wide(at + 128);
  auto d = load_wide(at + 192);
  for (at += 256, size -= 256; size >= 256; at += 256, size -= 256) {
    a = carry_wide(a, by, load_wide(at));
    b = carry_wide(b, by, load_wide(at + 64));
    c = carry_wide(c, by, load_wide(at + 128));
    d = carry_wide(d, by, load_wide(at + 192));
  }
  a = carry_wide(carry_wide(carry_wide(a, by_64, b), by_64, c), by_64, d);
  alignas(64) unsigned char lanes[64];
  _mm512_store_si512(lanes, a);
  auto state = load(lanes);
  for (int lane = 16; lane < 64; lane += 16) state = carry(state, by_16, load(lanes + lane));
  return {state, at, size};
}

const bool kFolds = __builtin_cpu_supports("pclmul") != 0 && __builtin_cpu_supports("sse4.1") != 0;
const bool kFoldsWide =
    kFolds && __builtin_cpu_supports("vpclmulqdq") != 0 && __builtin_cpu_supports("avx512f") != 0;

[[gnu::target("pclmul,sse4.1")]] std::uint32_t fold(const unsigned char* begin,
                                                    std::size_t length,
                                                    std::uint32_t crc) {
  const auto by_16 = factors(16);
  auto [a, at, size] =
      kFoldsWide && length >= 256 ? fold_256(begin, length, crc) : fold_64(begin, length, crc);
  for (; size >= 16; at += 16, size -= 16) a = carry(a, by_16, load(at));
  // 128 bits to 64, to 32, and by Barrett's reduction to the remainder.
  const auto low_words = _mm_setr_epi32(~0, 0, ~0, 0);
  const auto by_8 = _mm_set_epi64x(0, power_of_x(64));
  a = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, by_16, 0x10));
  a = _mm_xor_si128(_mm_srli_si128(a, 4),
                    _mm_clmulepi64_si128(_mm_and_si128(a, low_words), by_8, 0x00));
  const auto reduction = _mm_set_epi64x(0x01f7011641, 0x01db710641);
  auto quotient = _mm_clmulepi64_si128(_mm_and_si128(a, low_words), reduction, 0x10);
  quotient = _mm_clmulepi64_si128(_mm_and_si128(quotient, low_words), reduction, 0x00);
  return static_cast<std::uint32_t>(_mm_extract_epi32(_mm_xor_si128(a, quotient), 1));
}

std::size_t whole_blocks(std::size_t size) {
  return kFolds && size >= 64 ? size / 16 * 16 : kNone;
}

#elif defined(__aarch64__)

[[gnu::target("+crc")]] std::uint32_t fold(const unsigned char* at,
                                           std::size_t size,
                                           std::uint32_t crc) {
  for (; size >= 8; at += 8, size -= 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, at, sizeof word);
    crc = __crc32d(crc, word);
  }
  return crc;
}

const bool kFolds = (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;

std::size_t whole_blocks(std::size_t size) {
  return kFolds ? size / 8 * 8 : kNone;
}

#else

std::uint32_t fold(const unsigned char*, std::size_t, std::uint32_t crc) {
  return crc;
}

std::size_t whole_blocks(std::size_t) {
  return kNone;
}

#endif

}  // namespace

std::uint32_t crc32(std::span<const std::byte> bytes, std::uint32_t crc) {
  const auto* const begin = reinterpret_cast<const unsigned char*>(bytes.data());
  const auto folded = whole_blocks(bytes.size());
  if (folded > 0) crc = ~fold(begin, folded, ~crc);
  if (folded == bytes.size()) return crc;
  return static_cast<std::uint32_t>(::crc32_z(crc, begin + folded, bytes.size() - folded));
}

}  // namespace ferry::distckpt
