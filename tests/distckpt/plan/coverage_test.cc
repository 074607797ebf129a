#include "distckpt/plan/coverage.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "distckpt/base/error.h"
#include "tests/support/expect.h"
#include "tests/support/random_boxes.h"

namespace ferry::distckpt {
namespace coverage_test {

using support::contains;
using support::element_of;
using support::even_grid;
using support::fails;
using support::Random;
using support::random_box;
using support::random_grid;
using support::random_shape;
using support::random_tiling;

struct Tiling {
  Shape shape;
  std::vector<Box> boxes;
};

// A grid or an irregular tiling of at least `low` boxes.
Tiling make_tiling(Random& random, int low) {
  while (true) {
    const int rank = static_cast<int>(random.between(1, 4));
    const auto shape = random_shape(random, rank, 1, 9);
    auto boxes = random.chance(50) ? random_grid(random, shape, random_shape(random, rank, 1, 4))
                                   : random_tiling(random, shape, 20);
    if (std::ssize(boxes) >= low) return {shape, std::move(boxes)};
  }
}

// All elements of the defect's box are covered as often as it says.
void expect_true_defect(const Tiling& tiling, const std::optional<CoverageDefect>& defect) {
  ASSERT_TRUE(defect.has_value());
  ASSERT_FALSE(defect->box.empty());
  ASSERT_TRUE(defect->box.inside(tiling.shape));
  EXPECT_NE(defect->times, 1);
  for (std::int64_t i = 0; i < defect->box.volume(); ++i) {
    const auto at = element_of(defect->box, i);
    const auto times =
        std::ranges::count_if(tiling.boxes, [&](const Box& box) { return contains(box, at); });
    ASSERT_EQ(times, defect->times) << to_string(at);
  }
}

bool is_exact(const Tiling& tiling) {
  const auto whole = Box::whole(tiling.shape);
  for (std::int64_t i = 0; i < whole.volume(); ++i) {
    const auto at = element_of(whole, i);
    const auto times =
        std::ranges::count_if(tiling.boxes, [&](const Box& box) { return contains(box, at); });
    if (times != 1) return false;
  }
  return true;
}

TEST(Coverage, AcceptsGridsAndIrregularTilings) {
  Random random(1);
  for (int i = 0; i < 1000; ++i) {
    const auto [shape, boxes] = make_tiling(random, 1);
    EXPECT_FALSE(find_coverage_defect(shape, boxes)) << to_string(shape);
  }
}

TEST(Coverage, FindsTheBoxThatIsMissing) {
  Random random(2);
  for (int i = 0; i < 1000; ++i) {
    auto tiling = make_tiling(random, 2);
    const auto lost = tiling.boxes.back();
    tiling.boxes.pop_back();
    const auto defect = find_coverage_defect(tiling.shape, tiling.boxes);
    expect_true_defect(tiling, defect);
    EXPECT_EQ(defect->times, 0);
    EXPECT_EQ(intersect(defect->box, lost), defect->box) << "reaches beyond " << to_string(lost);
  }
}

TEST(Coverage, FindsTheBoxThatIsThereTwice) {
  Random random(3);
  for (int i = 0; i < 1000; ++i) {
    auto tiling = make_tiling(random, 1);
    const auto twice = tiling.boxes.front();
    tiling.boxes.push_back(twice);
    const auto defect = find_coverage_defect(tiling.shape, tiling.boxes);
    expect_true_defect(tiling, defect);
    EXPECT_EQ(defect->times, 2);
    EXPECT_EQ(intersect(defect->box, twice), defect->box) << "reaches beyond " << to_string(twice);
  }
}

TEST(Coverage, FindsTheBoxThatIsShifted) {
  Random random(4);
  for (int i = 0; i < 1000; ++i) {
    auto tiling = make_tiling(random, 2);
    auto& box = tiling.boxes.back();
    const int d = static_cast<int>(random.between(0, box.rank() - 1));
    box.offset[d] += box.end(d) < tiling.shape[d] ? 1 : -1;
    if (box.offset[d] < 0) continue;  // spans the whole dimension: cannot be shifted
    expect_true_defect(tiling, find_coverage_defect(tiling.shape, tiling.boxes));
  }
}

TEST(Coverage, AgreesWithCountingOnRandomBoxes) {
  Random random(5);
  for (int i = 0; i < 2000; ++i) {
    Tiling tiling{.shape = random_shape(random, static_cast<int>(random.between(1, 3)), 1, 4),
                  .boxes = {}};
    for (auto count = random.between(0, 5); count > 0; --count) {
      tiling.boxes.push_back(random_box(random, tiling.shape));
    }
    const auto defect = find_coverage_defect(tiling.shape, tiling.boxes);
    ASSERT_EQ(!defect.has_value(), is_exact(tiling));
    if (defect) expect_true_defect(tiling, defect);
  }
}

TEST(Coverage, OneBoxOfThousandsIsFound) {
  const Shape shape{64, 1024, 512};  // 64 experts, each in an 8 x 8 grid
  auto boxes = even_grid(shape, {64, 8, 8});
  ASSERT_EQ(boxes.size(), 4096U);
  EXPECT_FALSE(find_coverage_defect(shape, boxes));
  const auto lost = boxes[2777];
  boxes.erase(boxes.begin() + 2777);
  const auto defect = find_coverage_defect(shape, boxes);
  ASSERT_TRUE(defect.has_value());
  EXPECT_EQ(defect->box, lost);
  EXPECT_EQ(defect->times, 0);
}

TEST(Coverage, ScalarsAreCoveredByOneBox) {
  EXPECT_FALSE(find_coverage_defect({}, std::vector<Box>{Box{}}));
  EXPECT_EQ(find_coverage_defect({}, std::vector<Box>{})->times, 0);
  EXPECT_EQ(find_coverage_defect({}, std::vector<Box>{Box{}, Box{}})->times, 2);
}

TEST(Coverage, EmptyTensorsAndEmptyBoxesNeedNothing) {
  EXPECT_FALSE(find_coverage_defect({3, 0}, std::vector<Box>{}));
  const std::vector<Box> boxes{Box::whole({3, 2}), {.offset = {1, 2}, .size = {2, 0}}};
  EXPECT_FALSE(find_coverage_defect({3, 2}, boxes));
}

TEST(Coverage, RefusesBoxesThatLeaveTheShape) {
  const std::vector<Box> boxes{{.offset = {2}, .size = {3}}};
  EXPECT_TRUE(
      fails(ErrorKind::kLayout, {"[2:5]", "[4]"}, [&] { find_coverage_defect({4}, boxes); }));
  const std::vector<Box> flat{{.offset = {0}, .size = {4}}};
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"[0:4]", "[2, 2]"}, [&] {
    find_coverage_defect({2, 2}, flat);
  }));
}

// An exact tiling, but each dimension is cut by boxes that span all others: a check that looks at
// every slab would look 100^5 times.
TEST(Coverage, RefusesToLookForever) {
  constexpr std::int64_t kCuts = 100;
  const Shape shape{kCuts, kCuts, kCuts, kCuts, kCuts, 5};
  std::vector<Box> boxes;
  for (int d = 0; d < 5; ++d) {
    for (std::int64_t i = 0; i < kCuts; ++i) {
      Box box = Box::whole(shape);
      box.offset[5] = d;
      box.size[5] = 1;
      box.offset[d] = i;
      box.size[d] = 1;
      boxes.push_back(box);
    }
  }
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"500 boxes", "irregularly"},
                    [&] { find_coverage_defect(shape, boxes); }));
}

TEST(RequireExactlyOnce, NamesTensorBoxAndTimes) {
  const std::vector<Box> half{{.offset = {0, 0}, .size = {2, 8}}};
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"lm_head.weight", "[2:4, 0:8]", "are read 0 times"}, [&] {
    require_exactly_once("lm_head.weight", {4, 8}, half, "read");
  }));
  const std::vector<Box> twice{{.offset = {0, 0}, .size = {4, 8}},
                               {.offset = {1, 4}, .size = {1, 4}}};
  EXPECT_TRUE(
      fails(ErrorKind::kLayout, {"lm_head.weight", "[1:2, 4:8]", "are written 2 times"}, [&] {
        require_exactly_once("lm_head.weight", {4, 8}, twice, "written");
      }));
  const std::vector<Box> beyond{{.offset = {0, 0}, .size = {5, 8}}};
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"lm_head.weight", "[0:5, 0:8]"}, [&] {
    require_exactly_once("lm_head.weight", {4, 8}, beyond, "read");
  }));
}

}  // namespace coverage_test
}  // namespace ferry::distckpt
