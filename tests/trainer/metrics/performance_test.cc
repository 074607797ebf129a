#include "trainer/metrics/performance.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <vector>

#include "distckpt/base/error.h"
#include "tests/support/expect.h"
#include "trainer/metrics/progress_line.h"

namespace ferry::trainer {
namespace performance_test {

using support::fails;

TEST(Performance, HasTheNamesAndUnitsOfVerl) {
  const auto found =
      performance_metrics({.seconds = 4,
                           .tokens = 8000,
                           .response_tokens = 1000,
                           .num_gpus = 2,
                           .max_memory_allocated = std::int64_t{3} << 30,
                           .timing = {{"gen", 1}, {"reward", 3}, {"update_actor", 2}}});
  EXPECT_EQ(found, (Metrics{{"perf/total_num_tokens", 8000},
                            {"perf/time_per_step", 4},
                            {"perf/throughput", 1000},
                            {"perf/max_memory_allocated_gb", 3},
                            {"perf/max_memory_reserved_gb", 0},
                            {"perf/cpu_memory_used_gb", 0},
                            {"timing_s/gen", 1},
                            {"timing_s/reward", 3},
                            {"timing_s/update_actor", 2},
                            {"timing_per_token_ms/gen", 1},
                            {"timing_per_token_ms/update_actor", 0.25}}));
  EXPECT_TRUE(fails(ErrorKind::kBug, {"0 s"}, [] { performance_metrics({}); }));
}

TEST(Performance, SaysHowUnevenRanksAre) {
  EXPECT_EQ(seqlen_metrics(std::array<std::int64_t, 3>{10, 4, 7}),
            (Metrics{{"global_seqlen/min", 4},
                     {"global_seqlen/max", 10},
                     {"global_seqlen/minmax_diff", 6},
                     {"global_seqlen/mean", 7}}));
}

TEST(Performance, ReadsTheMemoryOfTheHost) {
  EXPECT_GT(host_memory_used(), 1 << 20);
}

TEST(ProgressLine, SaysWhatAStepHasAndHowLongTheRestTakes) {
  ProgressLine line(10);
  EXPECT_EQ(
      line.format({.step = 2, .time = 100, .values = {{"train/loss", 1.25}, {"train/lr", 1e-5}}}),
      "step 2/10  loss 1.2500  lr 1e-05");
  EXPECT_EQ(
      line.format({.step = 4, .time = 200, .values = {{"perf/throughput", 12345.6}, {"other", 1}}}),
      "step 4/10  12346 tokens/s/GPU  5 min left");
  EXPECT_EQ(line.format({.step = 9, .time = 240, .values = {}}), "step 9/10  20 s left");
  EXPECT_EQ(line.format({.step = 10, .time = 260, .values = {}}), "step 10/10");
}

}  // namespace performance_test
}  // namespace ferry::trainer
