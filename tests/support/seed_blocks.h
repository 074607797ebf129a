// Random cases in blocks of seeds: a block is a test, and a failure names the block and the seed.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdint>

namespace ferry::support {

// Calls one(seed) for block `block` of `num_blocks` about equal ones of the seeds first...last, up
// to the first that fails.
template <typename One>
void for_each_seed(int block, int num_blocks, std::uint64_t first, std::uint64_t last, One&& one) {
  const auto count = last - first + 1;
  const auto blocks = static_cast<std::uint64_t>(num_blocks);
  const auto index = static_cast<std::uint64_t>(block);
  ASSERT_GE(count, blocks) << "a block would test nothing";
  for (auto seed = first + count * index / blocks; seed < first + count * (index + 1) / blocks;
       ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    one(seed);
    if (testing::Test::HasFailure()) return;
  }
}

// The fixture of such tests. A suite derives from it and is instantiated with all().
template <int kNumBlocks>
class SeedBlocksOf : public testing::TestWithParam<int> {
 protected:
  template <typename One>
  static void for_each_seed(std::uint64_t first, std::uint64_t last, One&& one) {
    support::for_each_seed(GetParam(), kNumBlocks, first, last, one);
  }

 public:
  static auto all() { return testing::Range(0, kNumBlocks); }
};
using SeedBlocks = SeedBlocksOf<10>;

}  // namespace ferry::support
