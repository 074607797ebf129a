// Copies between ranks that hold shards and ranks that want them.
#include "distckpt/plan/rank_plan.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "distckpt/base/error.h"
#include "tests/support/expect.h"

namespace ferry::distckpt {
namespace rank_plan_test {

using support::fails;

// Rows [from, from + count) of "w" [rows, 2].
ShardedTensor rows(std::int64_t from, std::int64_t count, std::int64_t all, int replica = 0) {
  return {.key = "w",
          .local_shape = {count, 2},
          .global_shape = {all, 2},
          .global_offset = {from, 0},
          .replica_id = {replica}};
}

std::vector<std::string> described(const RankPlan& plan) {
  std::vector<std::string> copies;
  for (const auto& copy : plan.copies) {
    copies.push_back(fmt::format("{} {} {}.{}->{}.{}", plan.names[copy.tensor], to_string(copy.box),
                                 copy.source.rank, copy.source.shard, copy.target.rank,
                                 copy.target.shard));
  }
  return copies;
}

TEST(PlanBetweenRanks, CutsBoxesWhereEitherSideDoes) {
  const auto plan =
      plan_between_ranks({{rows(0, 4, 6)}, {rows(4, 2, 6)}}, {{rows(0, 3, 6)}, {rows(3, 3, 6)}});
  EXPECT_EQ(described(plan),
            (std::vector<std::string>{"w [0:3, 0:2] 0.0->0.0", "w [3:4, 0:2] 0.0->1.0",
                                      "w [4:6, 0:2] 1.0->1.0"}));
  EXPECT_TRUE(plan.fills.empty());
  EXPECT_TRUE(plan.copies[0].is_local());
  EXPECT_EQ(plan.copies[2].num_bytes(), 2 * 2 * 2);
}

TEST(PlanBetweenRanks, GivesEveryReplicaItsCopyOutOfItsOwnMemoryWhereThatHoldsIt) {
  const std::vector<std::vector<ShardedTensor>> held{{rows(0, 4, 4)}, {rows(0, 4, 4, 1)}};
  EXPECT_EQ(described(plan_between_ranks(held, held)),
            (std::vector<std::string>{"w [0:4, 0:2] 0.0->0.0", "w [0:4, 0:2] 1.0->1.0"}));
}

TEST(PlanBetweenRanks, FillsWhatTheTargetHasBehindTheEndOfTheSource) {
  const auto plan = plan_between_ranks({{rows(0, 5, 5)}}, {{rows(0, 4, 8)}, {rows(4, 4, 8)}});
  EXPECT_EQ(described(plan),
            (std::vector<std::string>{"w [0:4, 0:2] 0.0->0.0", "w [4:5, 0:2] 0.0->1.0"}));
  ASSERT_EQ(plan.fills.size(), 1U);
  EXPECT_EQ(to_string(plan.fills[0].box), "[5:8, 0:2]");
  EXPECT_EQ(plan.fills[0].target.rank, 1);
}

TEST(PlanBetweenRanks, LeavesWhatTheSourceHasBehindTheEndOfTheTarget) {
  const auto plan = plan_between_ranks({{rows(0, 8, 8)}}, {{rows(0, 5, 5)}});
  EXPECT_EQ(described(plan), std::vector<std::string>{"w [0:5, 0:2] 0.0->0.0"});
  EXPECT_TRUE(plan.fills.empty());
}

TEST(PlanBetweenRanks, RefusesRowsThatNobodyHolds) {
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"w", "[3:6, 0:2]"},
                    [] { plan_between_ranks({{rows(0, 3, 6)}}, {{rows(0, 6, 6)}}); }));
}

}  // namespace rank_plan_test
}  // namespace ferry::distckpt
