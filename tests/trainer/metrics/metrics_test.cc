#include "trainer/metrics/metrics.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "distckpt/base/error.h"
#include "tests/support/expect.h"
#include "trainer/metrics/performance.h"
#include "trainer/metrics/progress_line.h"

namespace ferry::trainer {
namespace metrics_test {

using support::fails;

// Reduces metrics as ranks do: all of them get the sums and the maxima.
Metrics reduce(std::vector<MetricAccumulator> ranks) {
  for (std::size_t i = 1; i < ranks.size(); ++i) {
    EXPECT_EQ(ranks[i].signature(), ranks[0].signature());
    for (std::size_t j = 0; j < ranks[0].to_sum().size(); ++j)
      ranks[0].to_sum()[j] += ranks[i].to_sum()[j];
    for (std::size_t j = 0; j < ranks[0].to_max().size(); ++j)
      ranks[0].to_max()[j] = std::max(ranks[0].to_max()[j], ranks[i].to_max()[j]);
  }
  return ranks[0].result();
}

TEST(MetricAccumulator, ReducesOverRanksAsOverValues) {
  std::vector<MetricAccumulator> ranks(3);
  MetricAccumulator whole;
  for (int i = 0; i < 12; ++i) {
    for (auto* one : {&ranks[static_cast<std::size_t>(i % 3)], &whole}) {
      one->add("train/loss", i * 0.5, Reduction::kMean, i + 1);
      one->add("tokens", i, Reduction::kSum);
      one->add("lowest", 7 - i, Reduction::kMin);
      one->add("highest", i - 40, Reduction::kMax);
    }
  }
  const auto reduced = reduce(ranks);
  EXPECT_EQ(reduced, whole.result());
  double weighted = 0;
  for (int i = 0; i < 12; ++i) weighted += i * 0.5 * (i + 1);
  EXPECT_EQ(
      reduced,
      (Metrics{{"train/loss", weighted / 78}, {"tokens", 66}, {"lowest", -4}, {"highest", -29}}));
}

TEST(MetricAccumulator, LeavesOutAMeanOfNothing) {
  MetricAccumulator one;
  one.add("a", 3, Reduction::kMean, 0);
  one.add("b", 0, Reduction::kSum);
  EXPECT_EQ(one.result(), (Metrics{{"b", 0}}));
}

TEST(MetricAccumulator, KeepsWhatIsNotFinite) {
  MetricAccumulator one;
  one.add("a", NAN, Reduction::kMean);
  one.add("a", 1, Reduction::kMean);
  EXPECT_TRUE(std::isnan(one.result().at("a")));
}

TEST(MetricAccumulator, TellsApartWhatDoesNotFitTogether) {
  MetricAccumulator a;
  MetricAccumulator b;
  a.add("x", 1, Reduction::kMin);
  b.add("x", 1, Reduction::kMax);
  EXPECT_NE(a.signature(), b.signature());
  EXPECT_TRUE(fails(ErrorKind::kBug, {"x", "two ways"}, [&] { a.add("x", 1, Reduction::kMax); }));
}

TEST(MetricAccumulator, HasTheThreeStatisticsOfVerl) {
  MetricAccumulator one;
  one.add_statistics("response_length", std::array{3.0, 9.0, 6.0});
  EXPECT_EQ(one.result(), (Metrics{{"response_length/mean", 6},
                                   {"response_length/max", 9},
                                   {"response_length/min", 3}}));
}

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

}  // namespace metrics_test
}  // namespace ferry::trainer
