#include "trainer/algorithms/overlong_penalty.h"

#include <gtest/gtest.h>

#include "tests/support/expect.h"

namespace ferry::trainer {
namespace overlong_penalty_test {

// Answers of up to 100 tokens, of which the last 20 are penalised; values by hand.
constexpr OverlongBufferConfig kBuffer{.len = 20, .penalty_factor = 2};

TEST(OverlongPenalty, IsNothingBeforeTheBuffer) {
  EXPECT_EQ(overlong_penalty(80, 100, kBuffer), 0);
}

TEST(OverlongPenalty, GrowsWithinTheBuffer) {
  EXPECT_EQ(overlong_penalty(85, 100, kBuffer), -0.5);
}

TEST(OverlongPenalty, IsTheFactorOfTheLongestAnswer) {
  EXPECT_EQ(overlong_penalty(100, 100, kBuffer), -2);
}

TEST(OverlongPenalty, NeedsABuffer) {
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"len 0 is not positive"},
                             [] { overlong_penalty(1, 100, {.len = 0}); }));
}

TEST(OverlongPenalty, NeedsABufferThatTheAnswerHolds) {
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"len 20 is above max_resp_len 10"},
                             [] { overlong_penalty(1, 10, {.len = 20}); }));
}

}  // namespace overlong_penalty_test
}  // namespace ferry::trainer
