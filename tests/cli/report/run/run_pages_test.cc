// The pages of a run: on a terminal, turns of an answer, the timeline of a step.
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "cli/report/run/run.h"
#include "cli/report/run/run_curves.h"
#include "cli/report/run/timeline_svg.h"
#include "cli/report/run/trajectory.h"
#include "cli/report/run/watch_page.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/temp_dir.h"

namespace ferry::cli {
namespace run_pages_test {

using nlohmann::json;

constexpr auto kNan = std::numeric_limits<double>::quiet_NaN();

// Steps of ten seconds each.
trainer::RunLog run_of(std::int64_t num_steps, std::optional<std::int64_t> total) {
  trainer::RunLog run{.metrics_path = "runs/one/metrics.jsonl", .total_steps = total};
  for (std::int64_t step = 1; step <= num_steps; ++step) {
    trainer::StepMetrics metrics{.step = step, .time = 1000 + 10.0 * static_cast<double>(step)};
    metrics.values["critic/score/mean"] = static_cast<double>(step);
    metrics.values["timing_s/step"] = 10;
    metrics.values["timing_s/gen"] = 6;
    run.metrics.steps.push_back(std::move(metrics));
  }
  return run;
}

std::string joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const auto& line : lines) text += line + "\n";
  return text;
}

TEST(Sparkline, GoesFromTheLeastToTheGreatest) {
  EXPECT_EQ(sparkline({0, 1, 2, 3, 4, 5, 6, 7}, 8, true), "▁▂▃▄▅▆▇█");
  EXPECT_EQ(sparkline({7, 0}, 8, false), "#_");
}

TEST(Sparkline, PutsValuesTogetherWhereColumnsAreFew) {
  EXPECT_EQ(sparkline({0, 0, 8, 8}, 2, false), "_#");
}

TEST(Sparkline, LeavesABlankWhereNoValueIsFinite) {
  EXPECT_EQ(sparkline({0, kNan, 1}, 3, false), "_ #");
}

TEST(WatchPage, SaysTheTimeThatIsLeft) {
  const auto lines = watch_page(run_of(12, 30), /*now=*/1125, {.unicode = false});
  ASSERT_GE(lines.size(), 2U);
  EXPECT_EQ(lines[0], "runs/one");
  EXPECT_EQ(
      lines[1],
      "step 12/30  [########            ]  10.0 s a step  3 min 0 s left  last step 5.0");  // cut
                                                                                            // at 80
                                                                                            // columns
}

TEST(WatchPage, SaysThatNoStepHasComeForLong) {
  const auto text = joined(watch_page(run_of(12, 30), /*now=*/2000, {.columns = 200}));
  EXPECT_NE(text.find("no step for 14 min 40 s"), text.npos);
}

TEST(WatchPage, KnowsARunThatIsComplete) {
  const auto text = joined(watch_page(run_of(30, 30), /*now=*/9000, {.columns = 200}));
  EXPECT_NE(text.find("step 30/30"), text.npos);
  EXPECT_NE(text.find("complete"), text.npos);
  EXPECT_EQ(text.find("left"), text.npos);
}

TEST(WatchPage, FitsItsScreen) {
  const auto lines = watch_page(run_of(200, 300), 4000, {.columns = 40, .rows = 5});
  EXPECT_LE(lines.size(), 5U);
  for (const auto& line : watch_page(run_of(200, 300), 4000, {.columns = 40, .unicode = false}))
    EXPECT_LE(line.size(), 40U) << line;
}

TEST(WatchPage, ShowsThePartsOfTheLastStep) {
  const auto text = joined(watch_page(run_of(3, 30), 1040, {.columns = 100, .unicode = false}));
  EXPECT_NE(text.find("parts of step 3\n"), text.npos);
  EXPECT_NE(text.find("6 s   60 %"), text.npos);
}

TEST(WatchPage, WarnsOfMetricsThatAreNotFinite) {
  auto run = run_of(3, 30);
  run.metrics.steps[1].values["actor/pg_loss"] = kNan;
  const auto text = joined(watch_page(run, 1040, {.columns = 100}));
  EXPECT_NE(text.find("warning: actor/pg_loss is not finite in 1 steps, at step 2 first"),
            text.npos);
}

TEST(ValidationName, IsTakenApart) {
  const auto name = validation_name("val-core/openai/gsm8k/acc/best@4/mean");
  ASSERT_TRUE(name.has_value());
  EXPECT_EQ(name->quantity, "openai/gsm8k/acc");
  EXPECT_EQ(name->statistic, "best@4/mean");
  EXPECT_TRUE(name->is_core);
  EXPECT_FALSE(validation_name("actor/pg_loss").has_value());
  EXPECT_FALSE(validation_name("val-aux/x").has_value());
}

// A call of a tool, and its answer.
json call(const std::string& name, const json& arguments, const std::string& content) {
  return {{"question", {{"name", name}, {"arguments", arguments}}},
          {"answer", {{"content", content}}}};
}

TEST(TurnsOf, FindsTheTextOfToolsInTheAnswer) {
  const auto turns = turns_of("let me see <call> 42 so it is 42.",
                              json::array({call("calculator", {{"a", 6}}, "42")}));
  ASSERT_EQ(turns.size(), 3U);
  EXPECT_EQ(turns[0].who, "model");
  EXPECT_EQ(turns[0].text, "let me see <call> ");
  EXPECT_EQ(turns[1].who, "calculator");
  EXPECT_EQ(turns[1].note, R"({"a":6})");
  EXPECT_EQ(turns[1].text, "42");
  EXPECT_EQ(turns[2].text, " so it is 42.");
}

TEST(TurnsOf, TellsTheErrorOfATool) {
  const json exchange{{"question", {{"name", "search"}}}, {"answer", {{"error", "no network"}}}};
  const auto turns = turns_of("a", json::array({exchange}));
  ASSERT_EQ(turns.size(), 2U);
  EXPECT_EQ(turns[1].text, "Error executing tool 'search': no network");
  EXPECT_EQ(turns[1].note, "error");
}

TEST(TurnsOf, TellsTheRewardOfAnEnvironmentAndPassesItsResetOver) {
  const json reset{{"question", {{"method", "reset"}}}, {"answer", {{"observation", "guess"}}}};
  const json step{{"question", {{"action", "5"}}},
                  {"answer", {{"observation", "lower"}, {"reward", 0.5}, {"done", true}}}};
  const auto turns = turns_of("5lower", json::array({reset, step}));
  ASSERT_EQ(turns.size(), 2U);
  EXPECT_EQ(turns[0].text, "5");
  EXPECT_EQ(turns[1].who, "environment");
  EXPECT_EQ(turns[1].note, "reward 0.5, done");
}

// Answers of tools may stand in what the model wrote, too, and may be cut where they are long.
TEST(TurnsOf, TakesTheRunsOfTheModelAndNamesThoseOfOthers) {
  const auto exchanges = json::array({call("calc", {{"e", "9/3"}}, "3"),
                                      call("search", {{"q", "x"}}, std::string(300, 'y')),
                                      call("time", json::object(), "noon")});
  const auto cut = std::string(200, 'y') + "...";
  const auto turns = turns_of("", exchanges,
                              json::array({{true, "<call>9/3"},
                                           {false, "<t>3</t>"},
                                           {true, "more"},
                                           {false, "<t>" + cut + "</t><t>noon</t>"},
                                           {true, "so"}}));
  ASSERT_EQ(turns.size(), 6U);
  EXPECT_EQ(turns[0].text, "<call>9/3");
  EXPECT_EQ(turns[1].who, "calc");
  EXPECT_EQ(turns[1].note, R"({"e":"9/3"})");
  EXPECT_EQ(turns[1].text, "<t>3</t>");
  EXPECT_EQ(turns[2].who, "model");
  EXPECT_EQ(turns[3].who, "search");
  EXPECT_EQ(turns[3].text, "<t>" + cut + "</t><t>");
  EXPECT_EQ(turns[4].who, "time");
  EXPECT_EQ(turns[4].text, "noon</t>");
  EXPECT_EQ(turns[5].text, "so");
}

TEST(TurnsOf, NamesAProgramWhereItsQuestionsAreNone) {
  const json run{{"question", {{"method", "run"}}}, {"answer", {{"messages", json::array()}}}};
  const json answer{{"question", {{"method", "answer"}}}, {"answer", json::object()}};
  const auto turns = turns_of("", json::array({run, answer, answer}),
                              json::array({{true, "1+1"}, {false, "wrong"}, {true, "2"}}));
  ASSERT_EQ(turns.size(), 3U);
  EXPECT_EQ(turns[1].who, "program");
  EXPECT_EQ(turns[1].text, "wrong");
}

// The last step of an environment says nothing that the model reads.
TEST(TurnsOf, EndsWithTheRewardOfTheLastStep) {
  const auto step = [](double reward) {
    return json{{"question", {{"method", "step"}, {"action", "5"}}},
                {"answer", {{"observation", "lower"}, {"reward", reward}}}};
  };
  const auto turns = turns_of("", json::array({step(0), step(1)}),
                              json::array({{true, "5"}, {false, "lower"}, {true, "4"}}));
  ASSERT_EQ(turns.size(), 4U);
  EXPECT_EQ(turns[3].note, "reward 1.0");
}

TEST(ReadExchanges, GivesNoneUnlessThereIsOneForEachAnswer) {
  const support::TempDir dir;
  distckpt::write_text(dir / "3.jsonl", "{\"exchanges\": [1]}\n{\"exchanges\": [2, 3]}\n");
  EXPECT_EQ(read_exchanges(dir.path(), 3, 2).size(), 2U);
  EXPECT_TRUE(read_exchanges(dir.path(), 3, 5).empty());
  EXPECT_TRUE(read_exchanges(dir.path(), 4, 2).empty());
}

// The page of a run of these metrics at its last step.
std::string page_of(const trainer::Metrics& last) {
  auto run = run_of(2, {});
  run.metrics.steps.back().values = last;
  const auto summaries = trainer::summarize(run.metrics);
  return run_html({.log = run, .summaries = summaries});
}

TEST(RunHtml, ShowsALastScoreOfNothing) {
  const auto html = page_of({{"critic/score/mean", 0}});
  EXPECT_NE(html.find("mean score of the last step"), html.npos);
}

TEST(RunHtml, ShowsNoMemoryOfGpusThatThereAreNot) {
  const auto* const what = "most memory of a GPU";
  EXPECT_EQ(page_of({{"perf/max_memory_allocated_gb", 0}}).find(what), std::string::npos);
  EXPECT_NE(page_of({{"perf/max_memory_allocated_gb", 3}}).find(what), std::string::npos);
}

TEST(TimelineSvg, HasALaneForEachRankAndOneForPrograms) {
  const auto svg = timeline_svg({{.name = "gen", .start = 10, .end = 12, .rank = 0, .step = 1},
                                 {.name = "tool/a<b", .start = 10, .end = 11, .rank = 0, .step = 1},
                                 {.name = "gen", .start = 10, .end = 13, .rank = 1, .step = 1}});
  EXPECT_NE(svg.find(">rank 0<"), svg.npos);
  EXPECT_NE(svg.find(">rank 1<"), svg.npos);
  EXPECT_NE(svg.find(">programs<"), svg.npos);
  EXPECT_NE(svg.find("tool/a&lt;b"), svg.npos);
  EXPECT_NE(svg.find("gen 2.5 s"), svg.npos);  // of each, per rank
  EXPECT_EQ(timeline_svg({}), "");
}

}  // namespace run_pages_test
}  // namespace ferry::cli
