#include "distckpt/storage/network/md5.h"

#include <fmt/format.h>

#include <bit>
#include <cmath>
#include <cstring>

namespace ferry::distckpt {
namespace {

using State = std::array<std::uint32_t, 4>;

// RFC 1321, 3.4: the integer part of 4294967296 * abs(sin(i)).
std::array<std::uint32_t, 64> make_sines() {
  std::array<std::uint32_t, 64> sines{};
  for (std::size_t i = 0; i < sines.size(); ++i)
    sines[i] = static_cast<std::uint32_t>(std::fabs(std::sin(static_cast<double>(i + 1))) * 0x1p32);
  return sines;
}

constexpr std::array<std::array<int, 4>, 4> kTurns{
    {{7, 12, 17, 22}, {5, 9, 14, 20}, {4, 11, 16, 23}, {6, 10, 15, 21}}};

template <std::size_t kRound, typename Mix>
void run_round(State& s,
               const std::array<std::uint32_t, 16>& words,
               const std::array<std::uint32_t, 64>& sines,
               std::size_t step,
               std::size_t start,
               Mix&& mix) {
  for (std::size_t i = 0; i < 16; ++i) {
    const auto sum =
        s[0] + mix(s[1], s[2], s[3]) + words[(start + step * i) % 16] + sines[16 * kRound + i];
    s = {s[3], s[1] + std::rotl(sum, kTurns[kRound][i % 4]), s[1], s[2]};
  }
}

void add_block(State& state, const std::byte* block) {
  static const auto sines = make_sines();
  std::array<std::uint32_t, 16> words{};
  std::memcpy(words.data(), block, 64);  // little endian, as this machine is
  auto s = state;
  run_round<0>(s, words, sines, 1, 0, [](auto b, auto c, auto d) { return (b & c) | (~b & d); });
  run_round<1>(s, words, sines, 5, 1, [](auto b, auto c, auto d) { return (b & d) | (c & ~d); });
  run_round<2>(s, words, sines, 3, 5, [](auto b, auto c, auto d) { return b ^ c ^ d; });
  run_round<3>(s, words, sines, 7, 0, [](auto b, auto c, auto d) { return c ^ (b | ~d); });
  for (std::size_t i = 0; i < 4; ++i) state[i] += s[i];
}

}  // namespace

Md5 md5(std::span<const std::byte> bytes) {
  State state{0x67452301U, 0xefcdab89U, 0x98badcfeU, 0x10325476U};
  std::size_t at = 0;
  for (; at + 64 <= bytes.size(); at += 64) add_block(state, bytes.data() + at);
  std::array<std::byte, 128> end{};
  const auto rest = bytes.size() - at;
  if (rest > 0) std::memcpy(end.data(), bytes.data() + at, rest);
  end[rest] = std::byte{0x80};
  const std::size_t blocks = rest < 56 ? 1 : 2;
  const std::uint64_t bits = std::uint64_t{bytes.size()} * 8;
  std::memcpy(end.data() + 64 * blocks - 8, &bits, 8);
  for (std::size_t i = 0; i < blocks; ++i) add_block(state, end.data() + 64 * i);
  Md5 digest{};
  std::memcpy(digest.data(), state.data(), digest.size());
  return digest;
}

std::string hex_text(const Md5& digest) {
  return fmt::format("{:02x}", fmt::join(digest, ""));
}

}  // namespace ferry::distckpt
