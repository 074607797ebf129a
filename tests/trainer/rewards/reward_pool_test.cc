#include "trainer/rewards/reward_pool.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <vector>

#include "tests/support/expect.h"

namespace ferry::trainer {
namespace reward_pool_test {

// Scores each question by its data_source.
const std::string kProgram =
    R"(while read -r line; do id=${line#*'"id":'}; id=${id%%,*}; s=${line#*'"data_source":"'}; )"
    R"(echo "{\"id\": $id, \"score\": ${s%%'"'*}}"; done)";

// Requests of these numbers, whose scores are the numbers.
void ask(RewardPool& pool, const std::vector<std::size_t>& numbers) {
  for (const auto number : numbers) pool.ask(number, {.data_source = std::to_string(number)});
}

std::vector<double> scores_of(RewardPool& pool, const std::vector<std::size_t>& numbers) {
  std::vector<double> found;
  for (const auto& one : pool.take_scores(numbers)) found.push_back(one.score);
  return found;
}

TEST(RewardPool, ScoresEachRequest) {
  RewardPool pool({.command = kProgram}, 3);
  ask(pool, {5, 3, 1, 4});
  EXPECT_EQ(scores_of(pool, {1, 3, 4, 5}), (std::vector<double>{1, 3, 4, 5}));
  ask(pool, {3, 10});
  EXPECT_EQ(scores_of(pool, {10, 3}), (std::vector<double>{10, 3}));
  EXPECT_EQ(pool.num_restarts(), 0);
  EXPECT_EQ(pool.take_spans().size(), 6U);
}

TEST(RewardPool, KeepsScoresThatAreTakenLater) {
  RewardPool pool({.command = kProgram}, 2);
  ask(pool, {1, 2, 3});
  EXPECT_EQ(scores_of(pool, {2}), std::vector<double>{2});
  ask(pool, {4});
  EXPECT_EQ(scores_of(pool, {4, 1}), (std::vector<double>{4, 1}));
  EXPECT_TRUE(support::fails(ErrorKind::kBug, {"asked about 3 twice"}, [&] { ask(pool, {3}); }));
  EXPECT_EQ(scores_of(pool, {3}), std::vector<double>{3});
  EXPECT_TRUE(support::fails(ErrorKind::kBug, {"was not asked about 3"},
                             [&] { (void)scores_of(pool, {3}); }));
}

TEST(RewardPool, ScoresBeforeAllAreAsked) {
  RewardPool pool({.command = kProgram}, 2);
  ask(pool, {1});
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  std::size_t scored = 0;
  while (scored == 0 && std::chrono::steady_clock::now() < until) {
    pool.poll();
    scored = pool.take_spans().size();
  }
  EXPECT_EQ(scored, 1U);
  ask(pool, {2});
  EXPECT_EQ(scores_of(pool, {1, 2}), (std::vector<double>{1, 2}));
}

TEST(RewardPool, NamesTheWorkerThatFails) {
  RewardPool pool({.command = "read line; exit 3", .max_restarts = 1}, 2);
  pool.ask(0, {.data_source = "x", .solution_str = "its text"});
  EXPECT_TRUE(support::fails(ErrorKind::kIo, {"exit status 3", "worker 1 of 2", "x: its text"},
                             [&] { (void)scores_of(pool, {0}); }));
}

}  // namespace reward_pool_test
}  // namespace ferry::trainer
