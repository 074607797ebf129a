#include "tests/support/sha256.h"

#include <fmt/format.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

namespace ferry::support {
namespace {

using Word = std::uint32_t;

// The first 64 primes' roots, from which all constants are taken (FIPS 180-4, 4.2.2 and 5.3.3).
std::array<int, 64> primes() {
  std::array<int, 64> found{};
  std::size_t count = 0;
  for (int n = 2; count < found.size(); ++n) {
    bool prime = true;
    for (int d = 2; d * d <= n; ++d) prime = prime && n % d != 0;
    if (prime) found[count++] = n;
  }
  return found;
}

Word fraction_bits(long double root) {
  return static_cast<Word>((root - std::floor(root)) * 4294967296.0L);
}

struct Constants {
  std::array<Word, 64> round{};
  std::array<Word, 8> initial{};
  Constants() {
    const auto prime = primes();
    for (std::size_t i = 0; i < 64; ++i) {
      round[i] = fraction_bits(std::cbrt(static_cast<long double>(prime[i])));
    }
    for (std::size_t i = 0; i < 8; ++i) {
      initial[i] = fraction_bits(std::sqrt(static_cast<long double>(prime[i])));
    }
  }
};

void compress(std::array<Word, 8>& state, const std::uint8_t* block, const Constants& constants) {
  std::array<Word, 64> w{};
  for (std::size_t i = 0; i < 16; ++i) {
    w[i] = Word{block[4 * i]} << 24 | Word{block[4 * i + 1]} << 16 | Word{block[4 * i + 2]} << 8 |
           Word{block[4 * i + 3]};
  }
  for (std::size_t i = 16; i < 64; ++i) {
    const Word s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ w[i - 15] >> 3;
    const Word s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ w[i - 2] >> 10;
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (std::size_t i = 0; i < 64; ++i) {
    const Word s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const Word t1 = h + s1 + ((e & f) ^ (~e & g)) + constants.round[i] + w[i];
    const Word s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const Word t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
    h = g;
    g = f;
    f = e;
    e = d + t1;
    d = c;
    c = b;
    b = a;
    a = t1 + t2;
  }
  const std::array added{a, b, c, d, e, f, g, h};
  for (std::size_t i = 0; i < state.size(); ++i) state[i] += added[i];
}

}  // namespace

std::string sha256(std::span<const std::byte> bytes) {
  static const Constants constants;
  std::vector<std::uint8_t> padded;
  padded.reserve(bytes.size() + 72);
  for (const auto byte : bytes) padded.push_back(std::to_integer<std::uint8_t>(byte));
  padded.push_back(0x80);
  while (padded.size() % 64 != 56) padded.push_back(0);
  const auto bits = static_cast<std::uint64_t>(bytes.size()) * 8;
  for (int shift = 56; shift >= 0; shift -= 8) {
    padded.push_back(static_cast<std::uint8_t>(bits >> shift));
  }
  auto state = constants.initial;
  for (std::size_t at = 0; at < padded.size(); at += 64) compress(state, &padded[at], constants);
  std::string text;
  for (const auto word : state) text += fmt::format("{:08x}", word);
  return text;
}

}  // namespace ferry::support
