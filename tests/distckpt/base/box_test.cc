#include "distckpt/base/box.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "distckpt/base/error.h"
#include "tests/support/expect.h"
#include "tests/support/random_boxes.h"

namespace ferry::distckpt {
namespace box_test {

using support::contains;
using support::element_of;
using support::fails;
using support::index_of;
using support::Random;
using support::random_box;
using support::random_shape;

constexpr auto kMax = std::numeric_limits<std::int64_t>::max();

// The number of `boxes` that hold each element of `shape`.
std::vector<int> count_covers(const Shape& shape, const std::vector<Box>& boxes) {
  std::vector<int> covers(static_cast<std::size_t>(shape.product()), 0);
  for (const auto& box : boxes) {
    for (std::int64_t i = 0; i < box.volume(); ++i) {
      ++covers[static_cast<std::size_t>(index_of(shape, element_of(box, i)))];
    }
  }
  return covers;
}

TEST(Dims, RefuseMoreThanSixDimensions) {
  EXPECT_EQ((Dims{1, 2, 3, 4, 5, 6}).rank(), 6);
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"7 dimensions"}, [] { Dims{1, 2, 3, 4, 5, 6, 7}; }));
  Dims full{1, 2, 3, 4, 5, 6};
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"more than 6"}, [&] { full.push_back(7); }));
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"more than 6"}, [&] { full.push_front(7); }));
}

TEST(Dims, PushFrontAndDropFrontUndoEachOther) {
  Dims dims{3, 4};
  dims.push_front(2);
  EXPECT_EQ(dims, (Dims{2, 3, 4}));
  EXPECT_EQ(dims.drop_front(1), (Dims{3, 4}));
  EXPECT_EQ(dims.drop_front(3), Dims{});
  EXPECT_EQ(to_string(dims), "[2, 3, 4]");
}

TEST(Dims, CompareByLengthAndValuesAlone) {
  Dims cut{1, 2, 9};
  cut = cut.drop_front(0);
  EXPECT_NE((Dims{1, 2}), cut);
  EXPECT_LT((Dims{1, 2}), cut);
  EXPECT_LT((Dims{1, 2, 9}), (Dims{1, 3}));
  EXPECT_EQ((Dims{7, 1, 2}).drop_front(1), (Dims{1, 2}));
}

TEST(CheckedVolume, RefusesNegativeDimensionsAndOverflow) {
  EXPECT_EQ(checked_volume({}), 1);
  EXPECT_EQ(checked_volume({61, 256, 4096, 7168}), std::int64_t{61} * 256 * 4096 * 7168);
  EXPECT_EQ(checked_volume({5, 0, 7}), 0);
  EXPECT_EQ(checked_volume({kMax}), kMax);
  EXPECT_EQ(checked_volume({2, -1}), std::nullopt);
  EXPECT_EQ(checked_volume({kMax, 2}), std::nullopt);
  EXPECT_EQ(checked_volume({std::int64_t{1} << 32, std::int64_t{1} << 32}), std::nullopt);
}

TEST(CheckedVolume, RefusesOverflowWhereverTheZeroStands) {
  // Strides would overflow although there is no element.
  const auto big = std::int64_t{1} << 40;
  EXPECT_EQ(checked_volume({big, big, 0}), std::nullopt);
  EXPECT_EQ(checked_volume({0, big, big}), std::nullopt);
}

TEST(Box, InsideIsSafeAgainstOverflow) {
  EXPECT_TRUE((Box{.offset = {2, 0}, .size = {2, 5}}.inside({4, 5})));
  EXPECT_TRUE((Box{.offset = {4, 0}, .size = {0, 5}}.inside({4, 5})));
  EXPECT_FALSE((Box{.offset = {3, 0}, .size = {2, 5}}.inside({4, 5})));
  EXPECT_FALSE((Box{.offset = {-1, 0}, .size = {2, 5}}.inside({4, 5})));
  EXPECT_FALSE((Box{.offset = {0, 0}, .size = {-1, 5}}.inside({4, 5})));
  EXPECT_FALSE((Box{.offset = {kMax, 0}, .size = {kMax, 5}}.inside({4, 5})));
  EXPECT_FALSE((Box{.offset = {0}, .size = {4}}.inside({4, 5})));
  EXPECT_TRUE(Box{}.inside({}));
}

TEST(Box, PrintsASizeWhereItsEndOverflows) {
  EXPECT_EQ(to_string(Box{{kMax, 1}, {32, 2}}), fmt::format("[{}:+32, 1:3]", kMax));
  EXPECT_EQ(to_string(Box{{-kMax}, {-32}}), fmt::format("[{}:+-32]", -kMax));
}

TEST(Box, PrintsAsSlices) {
  EXPECT_EQ(to_string(Box{.offset = {0, 4}, .size = {2, 4}}), "[0:2, 4:8]");
  EXPECT_EQ(to_string(Box{}), "[]");
}

TEST(Intersect, HoldsExactlyTheElementsOfBoth) {
  Random random(1);
  for (int i = 0; i < 500; ++i) {
    const auto shape = random_shape(random, static_cast<int>(random.between(1, 4)), 1, 6);
    const auto a = random_box(random, shape);
    const auto b = random_box(random, shape);
    const auto both = intersect(a, b);
    EXPECT_EQ(both, intersect(b, a));
    for (std::int64_t e = 0; e < shape.product(); ++e) {
      const auto at = element_of(Box::whole(shape), e);
      ASSERT_EQ(both.has_value() && contains(*both, at), contains(a, at) && contains(b, at))
          << to_string(a) << " and " << to_string(b) << " at " << to_string(at);
    }
  }
}

TEST(Intersect, BoxesThatTouchShareNothing) {
  const Box left{.offset = {0, 0}, .size = {4, 4}};
  const Box right{.offset = {0, 4}, .size = {4, 4}};
  EXPECT_EQ(intersect(left, right), std::nullopt);
  EXPECT_EQ(intersect(Box{}, Box{}), Box{});
  EXPECT_TRUE(fails(ErrorKind::kBug, {"differ in rank"}, [&] { intersect(left, Box{}); }));
}

TEST(Subtract, PartsAreDisjointAndHoldTheRestExactly) {
  Random random(2);
  for (int i = 0; i < 500; ++i) {
    const int rank = static_cast<int>(random.between(1, 4));
    const auto shape = random_shape(random, rank, 1, 6);
    const auto box = random_box(random, shape);
    const auto hole = random_box(random, shape);
    const auto parts = subtract(box, hole);
    EXPECT_LE(std::ssize(parts), 2 * rank);
    const auto covers = count_covers(shape, parts);
    for (std::int64_t e = 0; e < shape.product(); ++e) {
      const auto at = element_of(Box::whole(shape), e);
      ASSERT_EQ(covers[static_cast<std::size_t>(e)], contains(box, at) && !contains(hole, at))
          << to_string(box) << " without " << to_string(hole) << " at " << to_string(at);
    }
  }
}

TEST(SplitFlatRange, EqualsTheRangeOfElementByElement) {
  Random random(3);
  for (int i = 0; i < 2000; ++i) {
    const int rank = static_cast<int>(random.between(1, 5));
    const auto shape = random_shape(random, rank, 1, 5);
    const auto begin = random.between(0, shape.product());
    const auto end = random.between(begin, shape.product());
    auto next = begin;
    const auto pieces = split_flat_range(shape, begin, end);
    ASSERT_LE(std::ssize(pieces), 2 * rank - 1);
    for (const auto& piece : pieces) {
      ASSERT_EQ(piece.begin, next) << to_string(shape) << " " << begin << ":" << end;
      for (std::int64_t e = 0; e < piece.box.volume(); ++e, ++next) {
        ASSERT_EQ(index_of(shape, element_of(piece.box, e)), next)
            << to_string(piece.box) << " of " << to_string(shape);
      }
    }
    ASSERT_EQ(next, end) << to_string(shape) << " " << begin << ":" << end;
  }
}

TEST(SplitFlatRange, WholeRowsAreOneBox) {
  const auto pieces = split_flat_range({4, 3, 10}, 12, 105);
  ASSERT_EQ(pieces.size(), 5U);
  EXPECT_EQ(to_string(pieces[0].box), "[0:1, 1:2, 2:10]");
  EXPECT_EQ(to_string(pieces[1].box), "[0:1, 2:3, 0:10]");
  EXPECT_EQ(to_string(pieces[2].box), "[1:3, 0:3, 0:10]");
  EXPECT_EQ(to_string(pieces[3].box), "[3:4, 0:1, 0:10]");
  EXPECT_EQ(to_string(pieces[4].box), "[3:4, 1:2, 0:5]");
}

TEST(SplitFlatRange, TakesScalarsAndEmptyRanges) {
  ASSERT_EQ(split_flat_range({}, 0, 1).size(), 1U);
  EXPECT_EQ(split_flat_range({}, 0, 1)[0].box, Box{});
  EXPECT_TRUE(split_flat_range({}, 0, 0).empty());
  EXPECT_TRUE(split_flat_range({3, 0}, 0, 0).empty());
  EXPECT_TRUE(split_flat_range({3, 2}, 6, 6).empty());
}

TEST(SplitFlatRange, RefusesRangesThatLeaveTheTensor) {
  for (const auto& [begin, end] : {std::pair(-1, 2), {0, 7}, {4, 3}, {7, 7}}) {
    EXPECT_TRUE(fails(ErrorKind::kLayout, {"[2, 3]"},
                      [&, b = begin, e = end] {
                        split_flat_range({2, 3}, b, e);
                      }))
        << begin << ":" << end;
  }
}

TEST(SameExtents, IgnoresLeadingOnesAlone) {
  EXPECT_TRUE(same_extents({4, 5}, {1, 1, 4, 5}));
  EXPECT_TRUE(same_extents({}, {1, 1}));
  EXPECT_TRUE(same_extents({1}, {}));
  EXPECT_FALSE(same_extents({4, 1, 5}, {4, 5}));
  EXPECT_FALSE(same_extents({4, 5}, {5, 4}));
  EXPECT_FALSE(same_extents({4, 5}, {2, 4, 5}));
  EXPECT_FALSE(same_extents({0}, {}));
}

TEST(Translate, MapsElementToElementAcrossLeadingOnes) {
  // Rows 2:4 of expert 7's gate in layer 3, stacked, and in a matrix of its own.
  const Box stacked{.offset = {3, 7, 0, 0}, .size = {1, 1, 8, 5}};
  const Box alone{.offset = {0, 0}, .size = {8, 5}};
  const Box part{.offset = {3, 7, 2, 1}, .size = {1, 1, 2, 3}};
  const Box same_part{.offset = {2, 1}, .size = {2, 3}};
  EXPECT_EQ(translate(part, stacked, alone), same_part);
  EXPECT_EQ(translate(same_part, alone, stacked), part);
}

TEST(Translate, ThereAndBackIsTheSame) {
  Random random(4);
  for (int i = 0; i < 500; ++i) {
    auto small = random_shape(random, static_cast<int>(random.between(0, 4)), 1, 5);
    auto large = small;
    while (large.rank() < kMaxRank && random.chance(50)) large.push_front(1);
    Box from = Box::whole(small);
    Box to = Box::whole(large);
    for (int d = 0; d < from.rank(); ++d) from.offset[d] = random.between(0, 9);
    for (int d = 0; d < to.rank(); ++d) to.offset[d] = random.between(0, 9);
    Box part = random_box(random, small);
    for (int d = 0; d < from.rank(); ++d) part.offset[d] += from.offset[d];
    const auto moved = translate(part, from, to);
    ASSERT_EQ(moved.volume(), part.volume());
    ASSERT_EQ(translate(moved, to, from), part);
  }
}

TEST(Translate, RefusesBoxesOfOtherExtents) {
  EXPECT_TRUE(fails(ErrorKind::kBug, {"[0:2, 0:3]", "[0:3, 0:2]"}, [] {
    translate(Box::whole({2, 3}), Box::whole({2, 3}), Box::whole({3, 2}));
  }));
}

}  // namespace box_test
}  // namespace ferry::distckpt
