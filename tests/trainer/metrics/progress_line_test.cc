#include "trainer/metrics/progress_line.h"

#include <gtest/gtest.h>

namespace ferry::trainer {
namespace progress_line_test {

TEST(ProgressLine, ShowsTheMetricsThatAStepHas) {
  ProgressLine line(100);
  EXPECT_EQ(line.format({.step = 12,
                         .time = 5,
                         .values = {{"perf/time_per_step", 3.21},
                                    {"train/loss", 1.2345},
                                    {"train/lr", 1e-5},
                                    {"something/else", 7}}}),
            "step 12/100  loss 1.2345  lr 1e-05  3.21 s");
}

TEST(ProgressLine, SaysTheTimeLeftFromTheSecondStepOn) {
  ProgressLine line(100);
  EXPECT_EQ(line.format({.step = 10, .time = 50}), "step 10/100");
  EXPECT_EQ(line.format({.step = 12, .time = 52}), "step 12/100  88 s left");
}

TEST(ProgressLine, SaysMinutesAndHoursWhereThatIsMuch) {
  ProgressLine minutes(101), hours(101);
  minutes.format({.step = 1, .time = 0});
  EXPECT_EQ(minutes.format({.step = 2, .time = 3}), "step 2/101  5 min left");
  hours.format({.step = 1, .time = 0});
  EXPECT_EQ(hours.format({.step = 2, .time = 61}), "step 2/101  1 h 41 min left");
}

TEST(ProgressLine, SaysNoTimeAtTheEnd) {
  ProgressLine line(3);
  line.format({.step = 2, .time = 0});
  EXPECT_EQ(line.format({.step = 3, .time = 9}), "step 3/3");
}

}  // namespace progress_line_test
}  // namespace ferry::trainer
