#include "cli/report/run/sample_browser.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "distckpt/storage/file_io.h"
#include "tests/support/temp_dir.h"

namespace ferry::cli {
namespace sample_browser_test {

constexpr auto kNan = std::numeric_limits<double>::quiet_NaN();

class SampleBrowserTest : public testing::Test {
 protected:
  // Answers "a0", "a1", ... of a step, worth these.
  void write(std::int64_t step, const std::vector<double>& scores) const {
    std::vector<trainer::LoggedSample> samples;
    for (const auto score : scores)
      samples.push_back(
          {.input = "q", .output = fmt::format("a{}", samples.size()), .score = score});
    trainer::SampleLog(dir_ / "rollouts", step).write(step, samples);
  }
  // The journal of step 1.
  void write_sessions(const char* lines) const {
    std::filesystem::create_directory(dir_ / "sessions");
    distckpt::write_text(dir_ / "sessions/1.jsonl", lines);
  }
  SampleSet read(std::optional<std::int64_t> step = {}) const {
    return read_sample_set(dir_ / "rollouts", step, dir_ / "sessions");
  }
  std::vector<std::int64_t> steps_of(const SampleSet& set) const {
    std::vector<std::int64_t> steps;
    for (const auto& step : set.steps) steps.push_back(step.step);
    return steps;
  }
  std::string page() const { return sample_browser("rollouts", read()); }

  support::TempDir dir_;
};

TEST_F(SampleBrowserTest, AFolderWithoutSamplesHasNoBrowser) {
  EXPECT_TRUE(read().steps.empty());
  EXPECT_EQ(page(), "");
}

TEST_F(SampleBrowserTest, ShowsTheBestAnswersFirstAndKeepsTheirRows) {
  write(1, {0, 2, kNan, 1});
  const auto step = read().steps.at(0);
  EXPECT_EQ(step.rows, (std::vector<std::size_t>{1, 3, 0, 2}));
  EXPECT_EQ(step.scores, (std::vector<double>{0, 1, 2}));
  EXPECT_EQ(step.samples.at(0).output, "a1");
  EXPECT_EQ(step.num_samples, 4);
}

// 30 right answers behind 3 wrong ones: all of these are among the 20 that are shown.
TEST_F(SampleBrowserTest, ShowsAnswersOfEveryScore) {
  std::vector<double> scores(33, 1);
  scores[0] = scores[1] = scores[2] = 0;
  write(1, scores);
  const auto step = read().steps.at(0);
  ASSERT_EQ(step.samples.size(), 20U);
  EXPECT_EQ(step.samples[16].score, 1);
  for (std::size_t i = 17; i < 20; ++i) EXPECT_EQ(step.samples[i].score, 0);
}

TEST_F(SampleBrowserTest, ShowsTheBestAndTheWorstOfManyScores) {
  std::vector<double> scores;
  for (int i = 0; i < 100; ++i) scores.push_back(i);
  write(1, scores);
  const auto step = read().steps.at(0);
  ASSERT_EQ(step.samples.size(), 20U);
  EXPECT_EQ(step.samples.front().score, 99);
  EXPECT_EQ(step.samples.back().score, 0);
}

TEST_F(SampleBrowserTest, ShowsStepsFromTheFirstToTheLast) {
  for (std::int64_t step = 1; step <= 41; ++step) write(step, {1});
  const auto set = read();
  EXPECT_EQ(set.num_steps, 41);
  ASSERT_EQ(set.steps.size(), 21U);
  for (std::size_t i = 0; i < 21; ++i)
    EXPECT_EQ(set.steps[i].step, 1 + 2 * static_cast<std::int64_t>(i));
}

TEST_F(SampleBrowserTest, ShowsTheStepThatIsAsked) {
  for (std::int64_t step = 1; step <= 41; ++step) write(step, {1});
  EXPECT_EQ(read(4).steps.at(2).step, 4);
  EXPECT_EQ(read(4).steps.size(), 22U);
  EXPECT_EQ(read(99).steps.size(), 21U);
}

TEST_F(SampleBrowserTest, CountsLinesThatAreNoAnswers) {
  write(1, {1});
  const auto path = dir_ / "rollouts/1.jsonl";
  distckpt::write_text(path, distckpt::read_text(path) + "{\"input\": 5}\nnothing\n");
  EXPECT_EQ(read().num_unreadable, 2);
  EXPECT_NE(page().find("2 lines are no answers"), std::string::npos);
}

TEST_F(SampleBrowserTest, ShowsTheTurnsOfSessions) {
  write(1, {1, 0});
  write_sessions(
      "{\"exchanges\": []}\n{\"exchanges\": [{\"question\": {\"name\": \"add\"}, "
      "\"answer\": {\"content\": \"1\"}}]}\n");
  const auto html = page();
  EXPECT_NE(html.find("<li class=\"other\"><b>add</b>"), std::string::npos) << html;
}

TEST_F(SampleBrowserTest, ShowsAnswersOfADamagedJournal) {
  write(1, {1, 0, 0});
  write_sessions(
      "{\"exchanges\": [1]}\n{\"exchanges\": 5}\n"
      "{\"exchanges\": [{\"question\": \"?\", \"answer\": []}]}\n");
  const auto html = page();
  EXPECT_NE(html.find("<pre>a0</pre>"), std::string::npos) << html;
  EXPECT_EQ(html.find("class=\"turns\""), std::string::npos);
}

TEST_F(SampleBrowserTest, TextsAreNoMarkup) {
  trainer::SampleLog(dir_ / "rollouts", 1)
      .write(1, std::vector<trainer::LoggedSample>{{.input = "<b>&", .output = "<i>", .score = 1}});
  const auto html = page();
  EXPECT_NE(html.find("<pre>&lt;b&gt;&amp;</pre>"), std::string::npos);
  EXPECT_EQ(html.find("<i>"), std::string::npos);
}

TEST_F(SampleBrowserTest, LeavesOutTheMiddleOfALongTextBetweenCharacters) {
  std::string text;
  for (int i = 0; i < 2000; ++i) text += "é";  // 4000 bytes, of which 3000 are shown
  trainer::SampleLog(dir_ / "rollouts", 1)
      .write(1, std::vector<trainer::LoggedSample>{{.input = "q", .output = text, .score = 1}});
  EXPECT_NE(page().find("1,000 bytes are left out here"), std::string::npos);
}

TEST_F(SampleBrowserTest, SaysHowManyAnswersHaveEachScore) {
  write(1, {1, 0, 1, 1});
  EXPECT_NE(page().find("Step 1: 4 answers, mean score 0.75: 3 × 1, 1 × 0."), std::string::npos)
      << page();
}

TEST_F(SampleBrowserTest, SaysThatAnswersHaveNoScore) {
  write(1, {kNan});
  EXPECT_NE(page().find("1 answers, without a score"), std::string::npos);
  EXPECT_NE(page().find("<span class=\"score c7\">none</span>"), std::string::npos);
}

}  // namespace sample_browser_test
}  // namespace ferry::cli
