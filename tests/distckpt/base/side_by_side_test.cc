#include "distckpt/base/side_by_side.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <vector>

namespace ferry::distckpt {
namespace side_by_side_test {

TEST(SideBySide, DoesEachOnce) {
  std::vector<std::atomic<int>> done(100);
  side_by_side(100, 7, [&](std::int64_t i) { ++done[static_cast<std::size_t>(i)]; });
  for (const auto& times : done) EXPECT_EQ(times, 1);
  side_by_side(0, 7, [](std::int64_t) { FAIL(); });
}

TEST(SideBySide, BeginsNothingAfterAFailure) {
  int done = 0;
  EXPECT_THROW(side_by_side(100, 1,
                            [&](std::int64_t i) {
                              if (i == 3) throw std::runtime_error("three");
                              ++done;
                            }),
               std::runtime_error);
  EXPECT_EQ(done, 3);
}

}  // namespace side_by_side_test
}  // namespace ferry::distckpt
