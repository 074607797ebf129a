#include "trainer/rewards/reward_command.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <vector>

#include "tests/support/expect.h"

namespace ferry::trainer {
namespace reward_command_test {

using std::chrono::milliseconds;

// A program of the shell that answers each line by `answer`, where $id is the question's.
std::string answers(const std::string& answer) {
  return R"(while read -r line; do id=${line#*'"id":'}; id=${id%%[,\}]*}; )" + answer + "; done";
}

const std::vector<RewardRequest> kTwo{{.data_source = "a"}, {.data_source = "b"}};

TEST(RewardCommand, PutsAnswersInTheOrderOfTheRequests) {
  RewardCommand program({.command = answers(R"(echo "{\"id\": $id, \"score\": $id}")")});
  const auto scores = program.compute_score(kTwo);
  ASSERT_EQ(scores.size(), 2U);
  EXPECT_EQ(scores[1].score, scores[0].score + 1);
}

TEST(RewardCommand, KeepsNumbersAndTextsBesideTheScore) {
  RewardCommand program(
      {.command = answers(R"(echo "{\"id\": $id, \"score\": 1, \"acc\": 0.5, \"pred\": \"x\"}")")});
  EXPECT_EQ(program.compute_score(kTwo).front(),
            (RewardScore{.score = 1, .numbers = {{"acc", 0.5}}, .texts = {{"pred", "x"}}}));
}

TEST(RewardCommand, RefusesALineThatIsNoAnswer) {
  RewardCommand program({.command = answers("echo good")});
  EXPECT_TRUE(support::fails(ErrorKind::kCorrupt, {"good"}, [&] { program.compute_score(kTwo); }));
}

TEST(RewardCommand, GivesUpOnAProgramThatEndsAgainAndAgain) {
  RewardCommand program({.command = "read line; exit 3", .max_restarts = 1});
  EXPECT_TRUE(support::fails(ErrorKind::kIo, {"exit status 3", "2 times in a row"},
                             [&] { program.compute_score(kTwo); }));
  EXPECT_EQ(program.num_restarts(), 1);
}

TEST(RewardCommand, GivesUpOnAProgramThatHangs) {
  RewardCommand program({.command = "sleep 600",
                         .timeout = milliseconds(50),
                         .start_timeout = milliseconds(50),
                         .max_restarts = 0});
  EXPECT_TRUE(
      support::fails(ErrorKind::kIo, {"said nothing"}, [&] { program.compute_score(kTwo); }));
}

}  // namespace reward_command_test
}  // namespace ferry::trainer
