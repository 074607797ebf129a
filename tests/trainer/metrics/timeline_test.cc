#include "trainer/metrics/timeline.h"

#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <filesystem>
#include <vector>

#include "distckpt/storage/file_io.h"
#include "tests/support/temp_dir.h"
#include "trainer/metrics/metric_log.h"
#include "trainer/metrics/run_log.h"

namespace {
// The seconds by which the host's clock was set.
std::int64_t g_clock_is_set_by = 0;
}  // namespace

// Stands before libc's: the host's clock, as a test sets it.
extern "C" int clock_gettime(clockid_t clock, timespec* time) noexcept {
  const auto result = static_cast<int>(::syscall(SYS_clock_gettime, clock, time));
  if (clock == CLOCK_REALTIME) time->tv_sec += g_clock_is_set_by;
  return result;
}

namespace ferry::trainer {
namespace timeline_test {

TEST(Timeline, MeasuresTheSameWhereTheClockIsSet) {
  const support::TempDir dir;
  Timeline timeline(dir.path(), 0, 1);
  const auto before = wall_time();
  const auto steady = steady_time();
  {
    const auto span = timeline.span("forward");
    g_clock_is_set_by = -3600;
  }
  const auto moved = wall_time() - before;
  const auto passed = steady_time() - steady;
  g_clock_is_set_by = 0;
  EXPECT_LT(moved, -3500) << "the test does not reach the clock";
  EXPECT_GE(passed, 0);
  EXPECT_LT(passed, 600);
  const auto seconds = timeline.end_step().at("forward");
  EXPECT_GE(seconds, 0);
  EXPECT_LT(seconds, 600);
}

TEST(Timeline, WritesTheSpansOfAStepAndSaysHowLongTheyTook) {
  const support::TempDir dir;
  Timeline timeline(dir.path(), 3, 1);
  timeline.begin_step(7);
  timeline.add("forward", 10, 12.5);
  timeline.add("forward", 13, 14);
  {
    const auto span = timeline.span("outer");
    const auto inner = timeline.span("inner");
  }
  const auto seconds = timeline.end_step();
  EXPECT_EQ(seconds.at("forward"), 3.5);
  EXPECT_GE(seconds.at("outer"), seconds.at("inner"));
  const auto spans = read_spans(dir / "timeline_rank3.jsonl");
  ASSERT_EQ(spans.size(), 4U);
  EXPECT_EQ(spans[0], (Span{.name = "forward", .start = 10, .end = 12.5, .rank = 3, .step = 7}));
  EXPECT_EQ(spans[2].name, "inner");
  EXPECT_LE(spans[3].start, spans[2].start);
  EXPECT_GE(spans[3].end, spans[2].end);
}

TEST(Timeline, ForgetsStepsThatARunDoesAgain) {
  const support::TempDir dir;
  for (const int first_step : {1, 3}) {
    Timeline timeline(dir.path(), 0, first_step);
    for (int step = first_step; step <= 4; ++step) {
      timeline.begin_step(step);
      timeline.add("run", first_step, first_step + 1);
      timeline.end_step();
    }
  }
  std::vector<std::pair<std::int64_t, double>> found;
  for (const auto& span : read_spans(dir / "timeline_rank0.jsonl"))
    found.emplace_back(span.step, span.start);
  EXPECT_EQ(found, (std::vector<std::pair<std::int64_t, double>>{{1, 1}, {2, 1}, {3, 3}, {4, 3}}));
}

TEST(StepSpans, AreThoseOfTheLastStepThatAllRanksWrote) {
  const support::TempDir dir;
  distckpt::write_text(dir / "metrics.jsonl", "");
  for (const int rank : {1, 0}) {
    Timeline timeline(dir / kTimelineFolder, rank, 1);
    for (int step = 1; step <= 3 + rank; ++step) {
      timeline.begin_step(step);
      timeline.add("b", 2, 3);
      timeline.add("a", 1, 2);
      timeline.add("all", 1, 3);
      timeline.end_step();
    }
  }
  const auto run = read_run(dir.path());
  const auto spans = read_step_spans(run, {});
  ASSERT_EQ(spans.size(), 6U);
  EXPECT_EQ(spans[0], (Span{.name = "all", .start = 1, .end = 3, .rank = 0, .step = 3}));
  EXPECT_EQ(spans[1].name, "a");
  EXPECT_EQ(spans[5], (Span{.name = "b", .start = 2, .end = 3, .rank = 1, .step = 3}));
  EXPECT_EQ(read_step_spans(run, 4).size(), 3U);
  EXPECT_TRUE(read_step_spans(run, 9).empty());
}

// The rollout of an asynchronous run has answered the last steps ahead.
TEST(StepSpans, AreOfAStepThatARankAheadWroteToo) {
  const support::TempDir dir;
  distckpt::write_text(dir / "metrics.jsonl", "");
  for (const auto& [rank, steps] : {std::pair(0, std::vector{1, 2, 3, 4}), {1, {1, 2, 5}}}) {
    Timeline timeline(dir / kTimelineFolder, rank, 1);
    for (const int step : steps) {
      timeline.begin_step(step);
      timeline.add("a", 1, 2);
      timeline.end_step();
    }
  }
  const auto spans = read_step_spans(read_run(dir.path()), {});
  ASSERT_EQ(spans.size(), 2U);
  EXPECT_EQ(spans[1], (Span{.name = "a", .start = 1, .end = 2, .rank = 1, .step = 2}));
}

TEST(StepSpans, PassOverLinesThatAreNone) {
  const support::TempDir dir;
  distckpt::write_text(
      dir / "timeline.jsonl",
      "{\"name\":\"a\",\"start\":1,\"end\":2}\n{\"name\":\"b\",\"start\":3,\"end\":2}\n"
      "{\"name\":1,\"start\":1,\"end\":2}\n{\"start\":1}\n{\"na");
  EXPECT_EQ(read_spans(dir / "timeline.jsonl"),
            std::vector{(Span{.name = "a", .start = 1, .end = 2, .rank = 0, .step = 0})});
}

}  // namespace timeline_test
}  // namespace ferry::trainer
