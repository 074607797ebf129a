#include "distckpt/plan/box_io.h"

#include <gtest/gtest.h>

#include <numeric>
#include <utility>
#include <vector>

#include "tests/support/expect.h"
#include "tests/support/random_boxes.h"

namespace ferry::distckpt {
namespace box_io_test {

using support::element_of;
using support::Random;
using support::random_shape;
using support::same_bytes;

// Strides that keep the elements apart, in any order of dimensions and with gaps; and the bytes
// they span.
std::pair<Dims, std::int64_t> random_strides(Random& random, const Dims& size, std::int64_t bytes) {
  std::vector<int> order(static_cast<std::size_t>(size.rank()));
  std::iota(order.rbegin(), order.rend(), 0);
  if (random.chance(50)) random.shuffle(order);
  Dims strides = Dims::filled(size.rank(), 0);
  for (const auto d : order) {
    if (random.chance(30)) bytes += random.between(1, 3);
    strides[d] = bytes;
    bytes *= size[d];
  }
  return {strides, bytes};
}

std::int64_t offset_of(const Dims& at, const Dims& strides) {
  std::int64_t offset = 0;
  for (int d = 0; d < at.rank(); ++d) offset += at[d] * strides[d];
  return offset;
}

// The bytes of a region in row-major order, by looking at every element.
std::vector<std::byte> gather(const std::vector<std::byte>& memory, const Region& region) {
  std::vector<std::byte> packed;
  const auto box = Box::whole(region.size);
  for (std::int64_t i = 0; i < box.volume(); ++i) {
    const auto at = region.at.offset + offset_of(element_of(box, i), region.at.strides);
    packed.insert(packed.end(), memory.begin() + at, memory.begin() + at + region.element_size);
  }
  return packed;
}

TEST(FoldRuns, RunsHoldTheRegionInRowMajorOrder) {
  Random random(1);
  for (int i = 0; i < 2000; ++i) {
    const auto element = random.between(1, 2) * random.between(1, 2) * random.between(1, 2);
    const auto size = random_shape(random, static_cast<int>(random.between(0, 4)), 1, 5);
    const auto [strides, bytes] = random_strides(random, size, element);
    const auto memory = random.bytes(bytes + 10);
    const Region region{
        .at = {.offset = 10, .strides = strides}, .size = size, .element_size = element};
    std::vector<std::byte> found;
    const auto runs = fold_runs(region);
    std::int64_t next = 0;
    std::int64_t end = 0;
    for_each_run(runs, [&](std::int64_t offset, std::int64_t index) {
      ASSERT_EQ(index, next++);
      found.insert(found.end(), memory.begin() + offset, memory.begin() + offset + runs.run_bytes);
      end = std::max(end, offset + runs.run_bytes);
    });
    ASSERT_EQ(runs.num_runs(), next);
    ASSERT_EQ(runs.end(), end);
    ASSERT_TRUE(same_bytes(gather(memory, region), found)) << to_string(size);
  }
}

TEST(FoldRuns, PackedDimensionsAreOneRun) {
  const Region packed{
      .at = {.offset = 5, .strides = {24, 8, 2}}, .size = {2, 3, 4}, .element_size = 2};
  EXPECT_EQ(fold_runs(packed).num_runs(), 1);
  EXPECT_EQ(fold_runs(packed).run_bytes, 48);
  const Region columns{.at = {.offset = 5, .strides = {100, 2}}, .size = {3, 4}, .element_size = 2};
  EXPECT_EQ(fold_runs(columns).num_runs(), 3);
  EXPECT_EQ(fold_runs(columns).run_bytes, 8);
  // A dimension of one element lies anywhere.
  const Region thin{
      .at = {.offset = 0, .strides = {8, 999, 2}}, .size = {3, 1, 4}, .element_size = 2};
  EXPECT_EQ(fold_runs(thin).num_runs(), 1);
}

TEST(FoldRuns, OfAnEmptyRegionHasNone) {
  const Region empty{.at = {.strides = {0, 2}}, .size = {0, 4}, .element_size = 2};
  EXPECT_EQ(fold_runs(empty).num_runs(), 0);
  for_each_run(fold_runs(empty), [](std::int64_t, std::int64_t) { FAIL(); });
}

TEST(CopyStrided, MovesEveryElementAndTouchesNothingElse) {
  Random random(2);
  for (int i = 0; i < 2000; ++i) {
    const auto element = random.between(1, 8);
    const auto size =
        random_shape(random, static_cast<int>(random.between(0, 4)), random.chance(10) ? 0 : 1, 5);
    const auto [from_strides, from_bytes] = random_strides(random, size, element);
    const auto [to_strides, to_bytes] = random_strides(random, size, element);
    const auto from = random.bytes(from_bytes);
    const auto before = random.bytes(to_bytes);
    auto expected = before;
    const auto box = Box::whole(size);
    for (std::int64_t e = 0; e < box.volume(); ++e) {
      const auto at = element_of(box, e);
      std::copy_n(from.begin() + offset_of(at, from_strides), element,
                  expected.begin() + offset_of(at, to_strides));
    }
    auto found = before;
    copy_strided(found.data(), to_strides, from.data(), from_strides, size, element);
    ASSERT_TRUE(same_bytes(expected, found)) << to_string(size);
  }
}

}  // namespace box_io_test
}  // namespace ferry::distckpt
