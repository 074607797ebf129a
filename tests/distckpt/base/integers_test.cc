#include "distckpt/base/integers.h"

#include <gtest/gtest.h>

namespace ferry::distckpt {
namespace {

TEST(Integers, CeilDivCountsThePieceThatIsNotFull) {
  EXPECT_EQ(ceil_div(0, 4), 0);
  EXPECT_EQ(ceil_div(1, 4), 1);
  EXPECT_EQ(ceil_div(4, 4), 1);
  EXPECT_EQ(ceil_div(5, 4), 2);
}

TEST(Integers, CeilDivHasTheTypeOfItsValue) {
  static_assert(std::is_same_v<decltype(ceil_div(std::size_t{5}, 4)), std::size_t>);
  static_assert(std::is_same_v<decltype(ceil_div(std::int64_t{5}, 4)), std::int64_t>);
  EXPECT_EQ(ceil_div(std::int64_t{1} << 40, 3), ((std::int64_t{1} << 40) + 2) / 3);
}

TEST(Integers, RoundUpKeepsAMultiple) {
  EXPECT_EQ(round_up(0, 64), 0);
  EXPECT_EQ(round_up(1, 64), 64);
  EXPECT_EQ(round_up(64, 64), 64);
  EXPECT_EQ(round_up(65, 64), 128);
}

TEST(Integers, ByteStridesOfARowMajorShape) {
  EXPECT_EQ(byte_strides({2, 3, 4}, 2), (Dims{24, 8, 2}));
}

TEST(Integers, ByteStridesOfAScalarAreNone) {
  EXPECT_EQ(byte_strides({}, 4), Dims{});
}

}  // namespace
}  // namespace ferry::distckpt
