#include "distckpt/coverage.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "tests/support/expect.h"

namespace ferry::distckpt {
namespace {

// Cuts a box at random places until it is in `count` pieces.
std::vector<Box> random_tiling(const Shape& shape, int count, std::mt19937& random) {
  std::vector<Box> boxes{Box::whole(shape)};
  for (int tries = 0; static_cast<int>(boxes.size()) < count && tries < 1000; ++tries) {
    const auto i = random() % boxes.size();
    const int dim = static_cast<int>(random() % static_cast<unsigned>(shape.rank()));
    auto& box = boxes[i];
    if (box.size[dim] < 2) continue;
    const auto cut = 1 + static_cast<std::int64_t>(random()) % (box.size[dim] - 1);
    Box rest = box;
    rest.offset[dim] += cut;
    rest.size[dim] -= cut;
    box.size[dim] = cut;
    boxes.push_back(rest);
  }
  return boxes;
}

TEST(Coverage, AcceptsEveryTilingAndFindsEveryDefect) {
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    const Shape shape{1 + static_cast<std::int64_t>(random() % 9),
                      1 + static_cast<std::int64_t>(random() % 9),
                      1 + static_cast<std::int64_t>(random() % 9)};
    auto boxes = random_tiling(shape, 1 + static_cast<int>(random() % 20), random);
    ASSERT_FALSE(find_coverage_defect(shape, boxes));
    const auto victim = random() % boxes.size();
    const auto box = boxes[victim];

    auto missing = boxes;
    missing.erase(missing.begin() + static_cast<std::ptrdiff_t>(victim));
    const auto gap = find_coverage_defect(shape, missing);
    ASSERT_TRUE(gap);
    EXPECT_EQ(gap->times, 0);
    EXPECT_TRUE(intersect(gap->box, box) == gap->box);

    auto doubled = boxes;
    doubled.push_back(box);
    const auto twice = find_coverage_defect(shape, doubled);
    ASSERT_TRUE(twice);
    EXPECT_EQ(twice->times, 2);
    EXPECT_TRUE(intersect(twice->box, box) == twice->box);
  }
}

TEST(Coverage, RefusesABoxThatLeavesTheShape) {
  const std::vector<Box> boxes{{.offset = {0, 1}, .size = {2, 2}}};
  EXPECT_TRUE(support::fails(ErrorKind::kLayout, {"[0:2, 1:3]", "[2, 2]"}, [&] {
    find_coverage_defect({2, 2}, boxes);
  }));
}

TEST(Coverage, IgnoresEmptyBoxesAndEmptyShapes) {
  const std::vector<Box> boxes{Box::whole({2, 2}), {.offset = {1, 1}, .size = {0, 1}}};
  EXPECT_FALSE(find_coverage_defect({2, 2}, boxes));
  EXPECT_FALSE(find_coverage_defect({0, 2}, {}));
}

}  // namespace
}  // namespace ferry::distckpt
