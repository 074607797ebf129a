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

#include "models/distributed/failure_board.h"
#include "tests/support/expect.h"

namespace ferry::trainer {
namespace worker_group_test {

DataProto rows(std::int64_t count) {
  std::vector<nlohmann::json> names;
  for (std::int64_t row = 0; row < count; ++row) names.emplace_back("row " + std::to_string(row));
  return DataProto({{"x", at::arange(count)}}, {{"name", names}}, {{"factor", 10}});
}

std::vector<std::int64_t> numbers(const DataProto& data, const char* key) {
  const auto tensor = data.tensor(key).contiguous();
  const auto* const begin = tensor.const_data_ptr<std::int64_t>();
  return {begin, begin + tensor.numel()};
}

DataProto ten_times(const DataProto& data) {
  return DataProto({{"y", data.tensor("x") * data.meta_info.at("factor").get<std::int64_t>()}},
                   {{"said", data.column("name")}});
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

TEST(WorkerGroup, GivesEachRankItsPartAndPutsTheAnswersTogetherInOrder) {
  for (const int size : {1, 2, 4}) {
    for (const std::int64_t count : {1, 2, 3, 4, 7, 8}) {
      std::mutex mutex;
      std::vector<std::int64_t> given;
      run_group(
          size, dp_compute_proto,
          [&](const DataProto& data) {
            const std::scoped_lock lock(mutex);
            given.push_back(data.size());
            return ten_times(data);
          },
          [&](WorkerGroup& group) {
            EXPECT_EQ(group.num_parts("act"), size);
            for (int call = 0; call < 2; ++call) {
              const auto answer = group.call("act", rows(count));
              std::vector<std::int64_t> expected;
              for (std::int64_t row = 0; row < count; ++row) expected.push_back(10 * row);
              EXPECT_EQ(numbers(answer, "y"), expected) << size << " ranks, " << count << " rows";
              EXPECT_EQ(answer.column("said"), rows(count).column("name"));
            }
          });
      // Equal parts: rows that are missing are repeated, and what comes of them is dropped.
      EXPECT_EQ(given, std::vector<std::int64_t>(static_cast<std::size_t>(2 * size),
                                                 (count + size - 1) / size));
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
      [&](const DataProto& data) {
        ++calls;
        EXPECT_EQ(data.size(), 3);
        return ten_times(data);
      },
      [](WorkerGroup& group) {
        EXPECT_EQ(group.num_parts("act"), 2);
        EXPECT_EQ(numbers(group.call("act", rows(6)), "y"),
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
        [&](const DataProto& data) {
          ++calls;
          return ten_times(data);
        },
        [](WorkerGroup& group) {
          EXPECT_EQ(numbers(group.call("act", rows(3)), "y"),
                    (std::vector<std::int64_t>{0, 10, 20}));
        });
    EXPECT_EQ(calls, 1);
  }
}

TEST(WorkerGroup, OneToAllGivesEveryRankEverythingAndOneAnswers) {
  std::atomic<int> calls = 0;
  run_group(
      3, one_to_all,
      [&](const DataProto& data) {
        ++calls;
        EXPECT_EQ(data.size(), 5);
        return ten_times(data);
      },
      [](WorkerGroup& group) {
        EXPECT_EQ(group.num_parts("act"), 0);
        EXPECT_EQ(group.call("act", rows(5)).size(), 5);
      });
  EXPECT_EQ(calls, 3);
}

TEST(WorkerGroup, RankZeroAlone) {
  std::atomic<int> calls = 0;
  run_group(
      2, rank_zero,
      [&](const DataProto& data) {
        ++calls;
        return ten_times(data);
      },
      [](WorkerGroup& group) { EXPECT_EQ(group.call("act", rows(5)).size(), 5); });
  EXPECT_EQ(calls, 1);
}

TEST(WorkerGroup, WhatIsUnderWayIsFinishedLater) {
  std::atomic<int> served = 0;
  run_group(
      2,
      [](const models::World& world) {
        return world.rank() == 1 ? Dispatch{.is_collect = true} : Dispatch::none();
      },
      [&](const DataProto& data) {
        ++served;
        return ten_times(data);
      },
      [&](WorkerGroup& group) {
        auto call = group.start("act", rows(2));
        while (served == 0) std::this_thread::yield();  // rank 0 has its hands free
        EXPECT_EQ(numbers(group.finish(std::move(call)), "y"), (std::vector<std::int64_t>{0, 10}));
      });
}

// A rank may work, or rank 0 think, for longer than a collective may take.
TEST(WorkerGroup, WaitsLongerThanTheTimeoutOfCollectives) {
  const auto timeout = std::chrono::milliseconds(1000);
  run_group(
      2, dp_compute_proto,
      [&](const DataProto& data) {
        if (data.tensor("x")[0].item<std::int64_t>() > 0)
          std::this_thread::sleep_for(1.5 * timeout);
        return ten_times(data);
      },
      [&](WorkerGroup& group) {
        EXPECT_EQ(group.call("act", rows(2)).size(), 2);
        std::this_thread::sleep_for(1.5 * timeout);
        EXPECT_EQ(group.call("act", rows(2)).size(), 2);
      },
      timeout);
}

TEST(WorkerGroup, AnExceptionOnAWorkerEndsTheRunEverywhere) {
  std::atomic<int> ended = 0;
  EXPECT_TRUE(support::fails(ErrorKind::kCorrupt, {"row 1 is bad"}, [&] {
    models::run_ranks(3, {.timeout = std::chrono::minutes(1)}, [&](models::World& world) {
      try {
        WorkerGroup group(world, std::chrono::minutes(5));
        group.add("act", dp_compute_proto(world), [&](const DataProto&) -> DataProto {
          if (world.rank() == 1) throw Error(ErrorKind::kCorrupt, "row 1 is bad");
          return {};
        });
        if (world.rank() > 0) return group.serve();
        group.call("act", rows(3));
        ADD_FAILURE() << "rank 0 has an answer of a rank that failed";
      } catch (const Error& error) {
        ++ended;
        models::announce_failure(world, error.what());
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
    group.add("update_actor", of_first, [&](const DataProto&) -> DataProto {
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
      models::announce_failure(world, "workers: the answer to update_actor");
      ++ended;
    }
  });
  EXPECT_EQ(ended, 2);
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
