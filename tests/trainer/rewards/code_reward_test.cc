// Programs in answers, run on tests; `env` stands where a sandbox does.
#include "trainer/rewards/code_reward.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "tests/support/expect.h"

namespace ferry::trainer {
namespace code_reward_test {

using support::fails;

const CodeRewardOptions kOptions{.sandbox = {"env"}};

constexpr const char* kSums =
    R"({"inputs": ["2 3\n", "5 6\n", "1 1\n", "0 0\n"], "outputs": ["5\n", "11\n", "2\n", "0\n"]})";

std::string python(const std::string& program) {
  return "I think so:\n```python\n" + program + "\n```\nthat is it";
}

RewardScore score_of(const std::string& program, const char* tests = kSums) {
  return code_reward(python(program), tests, kOptions);
}

TEST(CodeReward, OfAProgramThatPassesAllTestsIsOne) {
  const auto score = score_of("print(sum(map(int, input().split())))");
  EXPECT_EQ(score.score, 1);
  EXPECT_EQ(score.numbers.at("acc"), 1);
  EXPECT_EQ(score.numbers.at("tests"), 4);
}

TEST(CodeReward, OfAProgramThatPassesSomeIsTheirShare) {
  const auto score = score_of("a, b = map(int, input().split())\nprint(a + b if a < 5 else 0)");
  EXPECT_EQ(score.score, 0.75);
  EXPECT_EQ(score.numbers.at("acc"), 0);
}

TEST(CodeReward, TakesTheLastBlockOfPython) {
  const auto both = python("print(1)") + python("print(sum(map(int, input().split())))");
  EXPECT_EQ(code_reward(both, kSums, kOptions).score, 1);
}

TEST(CodeReward, TakesNumbersThatAreNearForTheSame) {
  EXPECT_EQ(score_of("print(0.3333333)", R"({"inputs": [""], "outputs": ["0.33333334"]})").score,
            1);
  EXPECT_EQ(score_of("print(0.3334)", R"({"inputs": [""], "outputs": ["0.33333334"]})").score, 0);
}

TEST(CodeReward, PassesSpacesAtTheEndsOfLinesOver) {
  EXPECT_EQ(score_of("print(' a b  ')\nprint()", R"({"inputs": [""], "outputs": ["a b"]})").score,
            1);
  EXPECT_EQ(score_of("print('a  b')", R"({"inputs": [""], "outputs": ["a b"]})").score, 0);
}

TEST(CodeReward, OfAProgramThatFailsIsZero) {
  EXPECT_EQ(
      score_of("print(5)\nraise SystemExit(3)", R"({"inputs": [""], "outputs": ["5"]})").score, 0);
}

TEST(CodeReward, CallsAFunctionOrAMethodOfSolution) {
  constexpr const char* kTests =
      R"({"fn_name": "add", "inputs": ["1\n2", "[3]\n[4]"], "outputs": ["3", "[3, 4]"]})";
  EXPECT_EQ(score_of("def add(a, b): return a + b", kTests).score, 1);
  EXPECT_EQ(score_of("class Solution:\n  def add(self, a, b): return a + b", kTests).score, 1);
  EXPECT_EQ(score_of("def add(a, b): return b + a", kTests).score, 0.5);
}

TEST(CodeReward, EndsAProgramThatTakesTooLong) {
  const CodeRewardOptions options{.sandbox = {"env"}, .timeout = std::chrono::milliseconds(300)};
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(code_reward(python("import time\ntime.sleep(60)"), kSums, options).score, 0);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
}

TEST(CodeReward, EndsAProgramThatSaysTooMuch) {
  EXPECT_EQ(
      score_of("while True: print('x' * 100000)", R"({"inputs": [""], "outputs": ["x"]})").score,
      0);
}

TEST(CodeReward, CountsTheFirstTenTestsOfAProgramThatFailsOne) {
  std::string inputs, outputs;
  for (int i = 0; i < 15; ++i) {
    inputs += (i == 0 ? "" : ",") + std::string("\"") + std::to_string(i) + "\"";
    outputs += (i == 0 ? "" : ",") + std::string("\"") + std::to_string(i == 2 ? -1 : i) + "\"";
  }
  const auto tests = R"({"inputs": [)" + inputs + R"(], "outputs": [)" + outputs + "]}";
  const auto score = score_of("print(input())", tests.c_str());
  EXPECT_EQ(score.score, 0.9);
  EXPECT_EQ(score.numbers.at("tests"), 10);
}

TEST(CodeReward, RefusesAGroundTruthThatIsNoTests) {
  for (const auto* truth :
       {"", "5", "{}", R"({"inputs": ["1"], "outputs": []})", R"({"inputs": [], "outputs": []})"})
    EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"ground_truth: has no tests"}, [&] {
      code_reward("", truth, kOptions);
    })) << truth;
}

TEST(CodeReward, RefusesANameThatWouldBeMoreThanAName) {
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"fn_name is no name of Python: f(); g"}, [] {
    code_reward("", R"({"fn_name": "f(); g", "inputs": ["1"], "outputs": ["1"]})", kOptions);
  }));
}

TEST(CodeReward, OfAProgramThatEndsAsASandboxThatCannotBeMadeIsZero) {
  EXPECT_EQ(score_of("raise SystemExit(2)").score, 0);
}

TEST(CodeReward, SaysThatThereIsNoSandbox) {
  const CodeRewardOptions options{.sandbox = {"/bin/sh", "-c", "exit 2", "sh"}};
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"no sandbox can be made"},
                    [&] { code_reward(python("print(1)"), kSums, options); }));
}

}  // namespace code_reward_test
}  // namespace ferry::trainer
