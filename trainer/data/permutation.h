// Permutations that are computed, not stored: the i-th of n, from a key. The same on every platform
// and of every release, since data cursors in checkpoints depend on it.
#pragma once

#include <array>
#include <cstdint>

namespace ferry::trainer {

// The finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
// generators", OOPSLA 2014).
constexpr std::uint64_t mix64(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// A key out of a key and a number, in a chain: derive(derive(mix64(seed), epoch), window).
constexpr std::uint64_t derive(std::uint64_t key, std::uint64_t number) {
  return mix64(key ^ mix64(number));
}

// A Feistel network of kRounds rounds with mix64 as its function, over the smallest even number of
// bits, at least kLeastBits, that holds n; values of n and above are sent through again (cycle
// walking, Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002).
class Permutation {
 public:
  Permutation(std::uint64_t n, std::uint64_t key);

  // Requires i < n.
  std::uint64_t operator()(std::uint64_t i) const;

 private:
  static constexpr int kRounds = 8;
  static constexpr int kLeastBits = 10;  // fewer would reach few of the permutations of a small n

  std::uint64_t n_;
  std::array<std::uint64_t, kRounds> keys_{};
  int half_bits_;
};

}  // namespace ferry::trainer
