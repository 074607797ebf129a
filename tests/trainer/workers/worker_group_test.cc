// Rank 0 calls, the others serve: what each rank gets of a batch, and what comes of their answers.
#include "trainer/workers/worker_group.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "distckpt/base/integers.h"
#include "models/distributed/failure_board.h"
#include "tests/support/expect.h"

namespace ferry::trainer {
namespace worker_group_test {

// Rows of one token each: 0, 1, ...
WorkerData rows(std::int64_t count) {
  std::vector<RolloutBatch::Tokens> prompts;
  WorkerData data{.meta_info = {{"factor", 10}}};
  for (std::int64_t row = 0; row < count; ++row) prompts.push_back({row});
  data.batch = RolloutBatch::of(prompts);
  for (std::int64_t row = 0; row < count; ++row)
    data.batch.uid.push_back("row " + std::to_string(row));
  return data;
}

std::vector<std::int64_t> seeds(const WorkerData& data) {
  const auto* const begin = data.batch.seeds.const_data_ptr<std::int64_t>();
  return {begin, begin + data.batch.size()};
}

// In the column of seeds.
WorkerData ten_times(const WorkerData& call) {
  WorkerData answer{.batch = call.batch.without_columns()};
  answer.batch.seeds = call.batch.tokens * call.meta_info.at("factor").get<std::int64_t>();
  answer.batch.uid = call.batch.uid;
  return answer;
}

// Runs a group with one method "act"; rank 0 does `body`.
void run_group(int size,
               const std::function<Dispatch(const models::World&)>& dispatch,
               const WorkerGroup::Method& method,
               const std::function<void(WorkerGroup&)>& body,
               std::chrono::milliseconds timeout = std::chrono::minutes(1)) {
  models::run_ranks(size, {.timeout = timeout}, [&](models::World& world) {
    WorkerGroup group(world, std::chrono::minutes(5));
    const auto mine = dispatch(world);
    group.add("act", mine, mine.takes_part ? method : WorkerGroup::Method());
    if (world.rank() > 0) return group.serve();
    body(group);
    group.stop();
  });
}

// Rows that a rank is given in another order, or twice, come back in that of the batch.
TEST(WorkerGroup, AnswersAreInTheOrderOfTheBatch) {
  run_group(2, dp_compute_proto, ten_times, [&](WorkerGroup& group) {
    EXPECT_EQ(seeds(group.call("act", rows(4), {{3, 0, 3}, {1, 2, 0}})),
              (std::vector<std::int64_t>{0, 10, 20, 30}));
  });
}

TEST(RouteCall, APartLeavesRankZeroOnce) {
  // Ranks 1, 2, 5 have part 1, ranks 0, 3 part 0; rank 4 takes no part.
  const Dispatch first{.dp_rank = 0}, second{.dp_rank = 1};
  auto answers_second = second;
  answers_second.is_collect = true;
  auto answers_first = first;
  answers_first.is_collect = true;
  const auto routes = route_call(std::vector<Dispatch>{first, second, answers_second, answers_first,
                                                       Dispatch::none(), second});
  EXPECT_EQ(routes[1].rows_from, 0);
  EXPECT_EQ(routes[1].rows_to, (std::vector<int>{2, 5}));
  EXPECT_EQ(routes[2].rows_from, 1);
  EXPECT_EQ(routes[5].rows_from, 1);
  EXPECT_EQ(routes[3].rows_from, 0);  // rank 0 has that part itself
  EXPECT_TRUE(routes[0].rows_to.empty());
  EXPECT_FALSE(routes[4].takes_part);
  std::vector<int> answering;
  for (std::size_t rank = 0; rank < routes.size(); ++rank)
    if (routes[rank].answers) answering.push_back(static_cast<int>(rank));
  EXPECT_EQ(answering, (std::vector<int>{2, 3}));
}

// Rank 0 sends each row once, however many ranks compute it; the first of these hands it on.
TEST(WorkerGroup, RowsOfAPartAreHandedOnByTheFirstRankThatHasIt) {
  const auto dispatch = [](const models::World& world) {
    return world.rank() == 0 ? Dispatch::none()
                             : Dispatch{.dp_rank = 0, .is_collect = world.rank() == 3};
  };
  const std::int64_t count = 5000;  // so many that the rest of a call is small beside them
  const auto bytes = static_cast<std::int64_t>(rows(count).batch.to_bytes().size());
  std::atomic<std::int64_t> sent_by_others = 0;
  models::run_ranks(4, {.timeout = std::chrono::minutes(1)}, [&](models::World& world) {
    WorkerGroup group(world, std::chrono::minutes(5));
    const auto mine = dispatch(world);
    group.add("act", mine, mine.takes_part ? ten_times : WorkerGroup::Method());
    if (world.rank() > 0) {
      group.serve();
      if (world.rank() < 3) sent_by_others += group.bytes_sent();
      return;
    }
    EXPECT_EQ(group.call("act", rows(count)).batch.size(), count);
    EXPECT_GT(group.bytes_sent(), bytes);
    EXPECT_LT(group.bytes_sent(), bytes + bytes / 10);
    group.stop();
  });
  EXPECT_GT(sent_by_others, 2 * bytes);
  EXPECT_LT(sent_by_others, 2 * bytes + bytes / 5);
}

TEST(WorkerGroup, GivesEachRankItsPartAndPutsTheAnswersTogetherInOrder) {
  for (const int size : {1, 2, 4}) {
    for (const std::int64_t count : {1, 2, 3, 4, 7, 8}) {
      std::mutex mutex;
      std::vector<std::int64_t> given;
      run_group(
          size, dp_compute_proto,
          [&](const WorkerData& data) {
            const std::scoped_lock lock(mutex);
            given.push_back(data.batch.size());
            return ten_times(data);
          },
          [&](WorkerGroup& group) {
            EXPECT_EQ(group.num_parts("act"), size);
            for (int call = 0; call < 2; ++call) {
              const auto answer = group.call("act", rows(count));
              std::vector<std::int64_t> expected;
              for (std::int64_t row = 0; row < count; ++row) expected.push_back(10 * row);
              EXPECT_EQ(seeds(answer), expected) << size << " ranks, " << count << " rows";
              EXPECT_EQ(answer.batch.uid, rows(count).batch.uid);
            }
          });
      // Equal parts: rows that are missing are repeated, and what comes of them is dropped.
      EXPECT_EQ(given, std::vector<std::int64_t>(static_cast<std::size_t>(2 * size),
                                                 distckpt::ceil_div(count, size)));
    }
  }
}

TEST(WorkerGroup, RanksOfOneDataParallelRankHaveTheSameRowsAndOneAnswers) {
  // Ranks 0 and 1 share the second part, 2 and 3 the first; 1 and 3 answer.
  const auto dispatch = [](const models::World& world) {
    return Dispatch{.dp_rank = world.rank() < 2 ? 1 : 0, .is_collect = world.rank() % 2 == 1};
  };
  std::atomic<int> calls = 0;
  run_group(
      4, dispatch,
      [&](const WorkerData& data) {
        ++calls;
        EXPECT_EQ(data.batch.size(), 3);
        return ten_times(data);
      },
      [](WorkerGroup& group) {
        EXPECT_EQ(group.num_parts("act"), 2);
        EXPECT_EQ(seeds(group.call("act", rows(6))),
                  (std::vector<std::int64_t>{0, 10, 20, 30, 40, 50}));
      });
  EXPECT_EQ(calls, 4);
}

TEST(WorkerGroup, RanksThatTakeNoPartAreLeftAlone) {
  for (const int only : {0, 2}) {
    std::atomic<int> calls = 0;
    run_group(
        3,
        [only](const models::World& world) {
          return world.rank() == only ? Dispatch{.is_collect = true} : Dispatch::none();
        },
        [&](const WorkerData& data) {
          ++calls;
          return ten_times(data);
        },
        [](WorkerGroup& group) {
          EXPECT_EQ(seeds(group.call("act", rows(3))), (std::vector<std::int64_t>{0, 10, 20}));
        });
    EXPECT_EQ(calls, 1);
  }
}

TEST(WorkerGroup, OneToAllGivesEveryRankEverythingAndOneAnswers) {
  std::atomic<int> calls = 0;
  run_group(
      3, one_to_all,
      [&](const WorkerData& data) {
        ++calls;
        EXPECT_EQ(data.batch.size(), 5);
        return ten_times(data);
      },
      [](WorkerGroup& group) {
        EXPECT_EQ(group.num_parts("act"), 0);
        EXPECT_EQ(group.call("act", rows(5)).batch.size(), 5);
      });
  EXPECT_EQ(calls, 3);
}

TEST(WorkerGroup, ACallWithoutRowsReachesEveryRank) {
  std::atomic<int> calls = 0;
  run_group(
      4, one_to_all,
      [&](const WorkerData&) {
        ++calls;
        return WorkerData{.meta_info = calls.load()};
      },
      [](WorkerGroup& group) {
        EXPECT_GT(group.call("act").meta_info, 0);
        EXPECT_GT(group.call("act").meta_info, 1);
      });
  EXPECT_EQ(calls, 8);
}

TEST(WorkerGroup, RankZeroAlone) {
  std::atomic<int> calls = 0;
  run_group(
      2, rank_zero,
      [&](const WorkerData& data) {
        ++calls;
        return ten_times(data);
      },
      [](WorkerGroup& group) { EXPECT_EQ(group.call("act", rows(5)).batch.size(), 5); });
  EXPECT_EQ(calls, 1);
}

TEST(WorkerGroup, WhatIsUnderWayIsFinishedLater) {
  std::atomic<int> served = 0;
  run_group(
      2,
      [](const models::World& world) {
        return world.rank() == 1 ? Dispatch{.is_collect = true} : Dispatch::none();
      },
      [&](const WorkerData& data) {
        ++served;
        return ten_times(data);
      },
      [&](WorkerGroup& group) {
        auto call = group.start("act", rows(2));
        while (served == 0) std::this_thread::yield();  // rank 0 has its hands free
        EXPECT_EQ(seeds(group.finish(std::move(call))), (std::vector<std::int64_t>{0, 10}));
      });
}

// A rank may work, or rank 0 think, for longer than a collective may take.
TEST(WorkerGroup, WaitsLongerThanTheTimeoutOfCollectives) {
  const auto timeout = std::chrono::milliseconds(1000);
  run_group(
      2, dp_compute_proto,
      [&](const WorkerData& data) {
        if (data.batch.tokens[0].item<std::int64_t>() > 0)
          std::this_thread::sleep_for(1.5 * timeout);
        return ten_times(data);
      },
      [&](WorkerGroup& group) {
        EXPECT_EQ(group.call("act", rows(2)).batch.size(), 2);
        std::this_thread::sleep_for(1.5 * timeout);
        EXPECT_EQ(group.call("act", rows(2)).batch.size(), 2);
      },
      timeout);
}

TEST(WorkerGroup, AnExceptionOnAWorkerEndsTheRunEverywhere) {
  std::atomic<int> ended = 0;
  EXPECT_TRUE(support::fails(ErrorKind::kCorrupt, {"row 1 is bad"}, [&] {
    models::run_ranks(3, {.timeout = std::chrono::minutes(1)}, [&](models::World& world) {
      try {
        WorkerGroup group(world, std::chrono::minutes(5));
        group.add("act", dp_compute_proto(world), [&](const WorkerData&) -> WorkerData {
          if (world.rank() == 1) throw Error(ErrorKind::kCorrupt, "row 1 is bad");
          return {};
        });
        if (world.rank() > 0) return group.serve();
        group.call("act", rows(3));
        ADD_FAILURE() << "rank 0 has an answer of a rank that failed";
      } catch (const Error& error) {
        ++ended;
        models::announce_failure(world, error);
        if (world.rank() != 1) {
          EXPECT_NE(std::string(error.what()).find("rank 1, which failed: row 1 is bad"),
                    std::string::npos)
              << error.what();
          return;
        }
        throw;
      }
    });
  }));
  EXPECT_EQ(ended, 3);
}

// It is alive: nothing but time tells that it hangs. While others are called it is waited for.
TEST(WorkerGroup, AWorkerThatHangsIsWaitedForNoLongerThanItsTimeout) {
  const auto timeout = std::chrono::milliseconds(1500);
  std::atomic<int> ended = 0;
  models::run_ranks(3, {.timeout = std::chrono::minutes(1)}, [&](models::World& world) {
    WorkerGroup group(world, timeout);
    auto of_first = one_to_all(world);
    of_first.takes_part = world.rank() == 1;
    group.add("update_actor", of_first, [&](const WorkerData&) -> WorkerData {
      while (ended < 2) std::this_thread::sleep_for(std::chrono::milliseconds(10));
      return {};
    });
    auto of_second = one_to_all(world);
    of_second.takes_part = world.rank() == 2;
    group.add("act", of_second, ten_times);
    if (world.rank() == 1) {
      EXPECT_ANY_THROW(group.serve());  // when the others have gone
    } else if (world.rank() == 2) {
      EXPECT_TRUE(support::fails(ErrorKind::kIo,
                                 {"the next call from rank 0",
                                  "rank 0, which failed: workers: the answer to update_actor"},
                                 [&] { group.serve(); }));
      ++ended;
    } else {
      auto hanging = group.start("update_actor");
      for (int i = 0; i < 4; ++i) {
        std::this_thread::sleep_for(timeout / 2);
        (void)group.call("act", rows(1));
      }
      EXPECT_TRUE(support::fails(ErrorKind::kIo,
                                 {"the answer to update_actor from rank 1", "rank 1 hangs",
                                  "in update_actor", "trainer.worker_timeout"},
                                 [&] { (void)group.finish(std::move(hanging)); }));
      models::announce_failure(world, Error(ErrorKind::kIo, "workers: the answer to update_actor"));
      ++ended;
    }
  });
  EXPECT_EQ(ended, 2);
}

// Columns of tokens go from the rank that made them to that which reads them: rank 0 has neither.
TEST(WorkerGroup, ColumnsOfTokensGoFromWorkerToWorker) {
  constexpr std::int64_t kLength = 20000;
  const auto make = [](const WorkerData& call) {
    WorkerData answer{.batch = call.batch.without_columns()};
    for (std::int64_t row = 0; row < call.batch.size(); ++row)
      answer.batch.response_offsets[static_cast<std::size_t>(row) + 1] = kLength * (row + 1);
    answer.batch.offsets = answer.batch.response_offsets;
    answer.batch.tokens = call.batch.tokens.repeat_interleave(kLength);
    return answer;
  };
  const auto read = [](const WorkerData& call) {
    WorkerData answer{.batch = call.batch.without_columns()};
    answer.batch.scores = call.batch.tokens.reshape({call.batch.size(), kLength}).sum(1);
    return answer;
  };
  models::run_ranks(4, {.timeout = std::chrono::minutes(1)}, [&](models::World& world) {
    WorkerGroup group(world, std::chrono::minutes(5));
    group.add("make", dp_compute_proto(world), make);
    group.add("read", dp_compute_proto(world), read);
    if (world.rank() > 0) return group.serve();
    auto batch = rows(8).batch;
    batch.take(group.call("make", {.batch = batch}).batch);
    EXPECT_FALSE(batch.tokens.defined());
    EXPECT_EQ(batch.length(7), kLength);
    for (const auto& order :
         {RowsOfRanks{{0, 1}, {2, 3}, {4, 5}, {6, 7}}, {{7, 5}, {3, 1}, {0, 2}, {4, 6}}}) {
      batch.take(group.call("read", {.batch = batch.only({})}, order).batch);
      EXPECT_TRUE(at::equal(batch.scores, at::arange(8) * kLength));
    }
    // The second order takes some of rank 0's own rows elsewhere, and some of others to it.
    EXPECT_LT(group.take_costs().at("read").bytes, 5 * kLength * 4);
    group.stop();
  });
}

// Time in which ranks compute is none of messages.
TEST(WorkerGroup, CountsTheMessagesOfEachMethod) {
  const auto slow = std::chrono::milliseconds(700);
  run_group(
      2, dp_compute_proto,
      [&](const WorkerData& data) {
        std::this_thread::sleep_for(slow);
        return ten_times(data);
      },
      [&](WorkerGroup& group) {
        (void)group.call("act", rows(2));
        const auto costs = group.take_costs();
        ASSERT_EQ(costs.size(), 1);
        EXPECT_GT(costs.at("act").bytes,
                  static_cast<std::int64_t>(rows(1).batch.to_bytes().size()));
        EXPECT_GT(costs.at("act").seconds, 0);
        EXPECT_LT(costs.at("act").seconds, 0.5);
        EXPECT_TRUE(group.take_costs().empty());
      });
}

TEST(WorkerGroup, NamesAreKnownAndUnique) {
  models::run_ranks(1, {}, [](models::World& world) {
    WorkerGroup group(world, std::chrono::minutes(5));
    group.add("act", rank_zero(world), ten_times);
    EXPECT_TRUE(support::fails(ErrorKind::kBug, {"two methods act"},
                               [&] { group.add("act", rank_zero(world), ten_times); }));
    EXPECT_TRUE(
        support::fails(ErrorKind::kBug, {"no method sleep"}, [&] { (void)group.call("sleep"); }));
  });
}

}  // namespace worker_group_test
}  // namespace ferry::trainer
