#include "distckpt/elements/byte_planes.h"

#include <algorithm>
#include <array>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "distckpt/base/error.h"

namespace ferry::distckpt {
namespace {

// Pairs (low, high) -> all low, all high.
void split_pairs(const std::byte* from, std::size_t pairs, std::byte* low, std::byte* high) {
  std::size_t i = 0;
#ifdef __SSE2__
  const auto mask = _mm_set1_epi16(0xff);
  for (; i + 16 <= pairs; i += 16) {
    const auto a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * i));
    const auto b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * i + 16));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(low + i),
                     _mm_packus_epi16(_mm_and_si128(a, mask), _mm_and_si128(b, mask)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(high + i),
                     _mm_packus_epi16(_mm_srli_epi16(a, 8), _mm_srli_epi16(b, 8)));
  }
#endif
  for (; i < pairs; ++i) {
    low[i] = from[2 * i];
    high[i] = from[2 * i + 1];
  }
}

void join_pairs(const std::byte* low, const std::byte* high, std::size_t pairs, std::byte* into) {
  std::size_t i = 0;
#ifdef __SSE2__
  for (; i + 16 <= pairs; i += 16) {
    const auto a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(low + i));
    const auto b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(high + i));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(into + 2 * i), _mm_unpacklo_epi8(a, b));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(into + 2 * i + 16), _mm_unpackhi_epi8(a, b));
  }
#endif
  for (; i < pairs; ++i) {
    into[2 * i] = low[i];
    into[2 * i + 1] = high[i];
  }
}

}  // namespace

// Splitting pairs of bytes sorts the even bytes from the odd ones: log2(element_size) passes reach
// the planes.
void split_planes(std::span<const std::byte> elements,
                  std::int64_t element_size,
                  std::span<std::byte> planes,
                  std::vector<std::byte>& scratch) {
  require(element_size == 1 || element_size == 2 || element_size == 4 || element_size == 8,
          ErrorKind::kBug, "elements of {} bytes have no planes", element_size);
  const auto size = elements.size();
  if (element_size == 1) {
    std::ranges::copy(elements, planes.begin());
    return;
  }
  if (element_size == 2) {
    split_pairs(elements.data(), size / 2, planes.data(), planes.data() + size / 2);
    return;
  }
  scratch.resize(size);
  split_pairs(elements.data(), size / 2, scratch.data(), scratch.data() + size / 2);
  // Both halves hold elements of half the size: bytes 0, 2, .. and bytes 1, 3, .. of the whole
  // ones.
  const auto half = element_size / 2;
  const auto plane = size / static_cast<std::size_t>(element_size);
  std::vector<std::byte> parts(size / 2);
  std::vector<std::byte> deeper;
  for (std::size_t odd = 0; odd < 2; ++odd) {
    split_planes(std::span(scratch).subspan(odd * size / 2, size / 2), half, parts, deeper);
    for (std::size_t p = 0; p < static_cast<std::size_t>(half); ++p) {
      std::memcpy(planes.data() + (2 * p + odd) * plane, parts.data() + p * plane, plane);
    }
  }
}

void join_planes(std::span<const std::byte* const> planes,
                 std::span<std::byte> elements,
                 std::vector<std::byte>& scratch) {
  const auto count = planes.size();
  const auto size = elements.size();
  if (count == 1) {
    std::memcpy(elements.data(), planes[0], size);
    return;
  }
  if (count == 2) return join_pairs(planes[0], planes[1], size / 2, elements.data());
  scratch.resize(size);
  std::vector<std::byte> deeper;
  for (std::size_t odd = 0; odd < 2; ++odd) {
    std::array<const std::byte*, 4> half{};
    for (std::size_t p = 0; p < count / 2; ++p) half[p] = planes[2 * p + odd];
    join_planes(std::span(half).first(count / 2),
                std::span(scratch).subspan(odd * size / 2, size / 2), deeper);
  }
  join_pairs(scratch.data(), scratch.data() + size / 2, size / 2, elements.data());
}

}  // namespace ferry::distckpt
