#include "trainer/engine/seqlen_balancing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tests/support/expect.h"

namespace ferry::trainer {
namespace seqlen_balancing_test {

using Values = std::vector<std::int64_t>;
using Partitions = std::vector<Partition>;

// 8 - 7 = 1, 6 - 5 = 1, 4 - 1 = 3, 3 - 1 = 2: sums of 16 and 14.
TEST(KarmarkarKarp, DiffersTheLargestFirst) {
  EXPECT_EQ(karmarkar_karp(Values{8, 7, 6, 5, 4}, 2, false), (Partitions{{1, 3, 4}, {0, 2}}));
}

TEST(KarmarkarKarp, HasAsManyInEachPartIfAsked) {
  EXPECT_EQ(karmarkar_karp(Values{9, 1, 1, 1}, 2, false).front(), Partition{0});
  const auto parts = karmarkar_karp(Values{9, 1, 1, 1}, 2, true);
  ASSERT_EQ(parts.size(), 2U);
  for (const auto& part : parts) EXPECT_EQ(part.size(), 2U);
  EXPECT_EQ(parts.front().front(), 0U);
}

TEST(KarmarkarKarp, HasEachOfManyOnce) {
  Values values;
  for (std::int64_t i = 0; i < 60; ++i) values.push_back(1 + i * i % 37);
  for (const bool equal_size : {false, true}) {
    Partition all;
    for (const auto& part : karmarkar_karp(values, 6, equal_size)) {
      EXPECT_TRUE(std::ranges::is_sorted(part));
      all.insert(all.end(), part.begin(), part.end());
    }
    std::ranges::sort(all);
    ASSERT_EQ(all.size(), 60U);
    for (std::size_t i = 0; i < 60; ++i) EXPECT_EQ(all[i], i);
  }
}

TEST(KarmarkarKarp, RefusesMorePartsThanValues) {
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"1 sequences cannot be shared out over 2"},
                             [] { karmarkar_karp(Values{1}, 2, false); }));
  EXPECT_TRUE(
      support::fails(ErrorKind::kUsage, {"over 0"}, [] { karmarkar_karp(Values{1}, 0, false); }));
}

TEST(KarmarkarKarp, RefusesEqualPartsOfOtherNumbers) {
  EXPECT_TRUE(
      support::fails(ErrorKind::kUsage, {"3 sequences cannot be shared out evenly over 2"}, [] {
        karmarkar_karp(Values{1, 2, 3}, 2, true);
      }));
}

}  // namespace seqlen_balancing_test
}  // namespace ferry::trainer
