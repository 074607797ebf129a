#include "trainer/rewards/reward_pool.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "tests/support/expect.h"

namespace ferry::trainer {
namespace reward_pool_test {

// Scores each question by its data_source.
const std::string kProgram =
    R"(while read -r line; do id=${line#*'"id":'}; id=${id%%,*}; s=${line#*'"data_source":"'}; )"
    R"(echo "{\"id\": $id, \"score\": ${s%%'"'*}}"; done)";

TEST(RewardPool, ScoresEachRow) {
  RewardPool pool({.command = kProgram}, 3);
  for (int round = 0; round < 2; ++round) {
    pool.begin(7);
    for (std::size_t row = 0; row < 6; ++row)
      pool.ask(row, {.data_source = std::to_string(10 * round + static_cast<int>(row))});
    const auto& scores = pool.finish();
    for (std::size_t row = 0; row < 6; ++row)
      EXPECT_EQ(scores[row].score, 10 * round + static_cast<double>(row));
    EXPECT_EQ(scores[6], RewardScore{});
  }
  EXPECT_EQ(pool.num_restarts(), 0);
  EXPECT_EQ(pool.take_spans().size(), 12U);
}

TEST(RewardPool, ScoresBeforeAllAreAsked) {
  RewardPool pool({.command = kProgram}, 2);
  pool.begin(2);
  pool.ask(0, {.data_source = "1"});
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  std::size_t scored = 0;
  while (scored == 0 && std::chrono::steady_clock::now() < until) {
    pool.poll();
    scored = pool.take_spans().size();
  }
  EXPECT_EQ(scored, 1U);
  pool.ask(1, {.data_source = "2"});
  EXPECT_EQ(pool.finish()[1].score, 2);
}

TEST(RewardPool, NamesTheWorkerThatFails) {
  RewardPool pool({.command = "read line; exit 3", .max_restarts = 1}, 2);
  pool.begin(1);
  pool.ask(0, {.data_source = "x", .solution_str = "its text"});
  EXPECT_TRUE(support::fails(ErrorKind::kIo, {"exit status 3", "worker 1 of 2", "x: its text"},
                             [&] { (void)pool.finish(); }));
}

}  // namespace reward_pool_test
}  // namespace ferry::trainer
