#include "trainer/data/permutation.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"

namespace ferry::trainer {

Permutation::Permutation(std::uint64_t n, std::uint64_t key)
    : n_(n),
      half_bits_(
          distckpt::ceil_div(std::max<int>(kLeastBits, static_cast<int>(std::bit_width(n))), 2)) {
  for (std::uint64_t round = 0; round < kRounds; ++round) keys_[round] = derive(key, round);
}

std::uint64_t Permutation::operator()(std::uint64_t i) const {
  require(i < n_, ErrorKind::kBug, "permutation of {}: asked for number {}", n_, i);
  const auto mask = (std::uint64_t{1} << half_bits_) - 1;
  do {
    auto left = i >> half_bits_;
    auto right = i & mask;
    for (const auto key : keys_) left = std::exchange(right, left ^ (derive(key, right) & mask));
    i = left << half_bits_ | right;
  } while (i >= n_);
  return i;
}

}  // namespace ferry::trainer
