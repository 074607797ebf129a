#include "models/distributed/process_group.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "distckpt/base/error.h"
#include "models/distributed/failure_board.h"
#include "models/distributed/meeting_store.h"
#include "models/distributed/parallel_state.h"
#include "models/distributed/world.h"
#include "tests/support/expect.h"

namespace ferry::models {
namespace process_group_test {

std::vector<int> first_ranks(int count) {
  std::vector<int> ranks(static_cast<std::size_t>(count));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

TEST(ProcessGroup, MovesTensorsInTheOrderOfRanks) {
  run_ranks(3, {}, [](World& world) {
    const ProcessGroup group(world, "all", first_ranks(3));
    const auto mine = at::full({2, 2}, world.rank(), at::kBFloat16);
    const auto whole = group.all_gather(mine);
    EXPECT_TRUE(
        at::equal(whole, at::cat({at::full({2, 2}, 0), at::full({2, 2}, 1), at::full({2, 2}, 2)})
                             .to(at::kBFloat16)));
    // Rank r sends r + 1 rows to rank 0, none to the others.
    const auto rows = at::full({world.rank() + 1, 1}, world.rank(), at::kLong);
    const auto received = group.all_to_all(rows, {world.rank() + 1, 0, 0},
                                           world.rank() == 0 ? std::vector<std::int64_t>{1, 2, 3}
                                                             : std::vector<std::int64_t>{0, 0, 0});
    if (world.rank() == 0)
      EXPECT_TRUE(at::equal(received.flatten(), at::tensor({0, 1, 1, 2, 2, 2}, at::kLong)));
    else
      EXPECT_EQ(received.size(0), 0);
    EXPECT_TRUE(at::equal(group.broadcast(mine, 2), at::full({2, 2}, 2).to(at::kBFloat16)));
    const auto texts =
        group.all_gather_bytes(std::string(static_cast<std::size_t>(world.rank()), 'x'));
    EXPECT_EQ(texts, (std::vector<std::string>{"", "x", "xx"}));
  });
}

TEST(ProcessGroup, BringsRowsToTheirRanksWhereOnlyPlacesTellWhoHasThem) {
  run_ranks(3, {}, [](World& world) {
    const ProcessGroup group(world, "all", first_ranks(3));
    // Row i of six lies with rank i % 3, as its row 1 - i / 3; what lies behind these counts
    // nothing.
    const auto all = at::arange(12, at::kFloat).view({6, 2}).to(at::kBFloat16);
    const auto me = static_cast<std::int64_t>(world.rank());
    const auto mine = at::cat({all.narrow(0, 3 + me, 1), all.narrow(0, me, 1),
                               at::full({1, 2}, std::nan(""), at::kBFloat16)});
    auto places = at::full({6}, 2, at::kLong);
    places[me] = 1;
    places[3 + me] = 0;
    const auto got = group.all_to_all_rows(mine, places, at::tensor({2}, at::kInt));
    EXPECT_TRUE(at::equal(got, all.narrow(0, 2 * me, 2)));
  });
}

TEST(MakeTogether, TriesAgainOnAllRanksWhereOneCouldNotConnect) {
  run_ranks(3, {}, [](World& world) {
    int tries = 0;
    make_together("group", world, world.rank(), 3, [&](const auto& store) {
      ++tries;
      store->set(std::to_string(world.rank()), std::vector<std::uint8_t>{1});
      if (tries == 1 && world.rank() == 1) throw std::runtime_error("connection closed by peer");
    });
    EXPECT_EQ(tries, 2);
  });
}

TEST(MakeTogether, GivesUpWithTheReason) {
  run_ranks(2, {}, [](World& world) {
    int tries = 0;
    const auto make = [&](const auto&) {
      ++tries;
      if (world.rank() == 0) throw std::runtime_error("connection closed by peer");
    };
    if (world.rank() == 0)
      EXPECT_THROW(make_together("group", world, 0, 2, make), std::runtime_error);
    else
      EXPECT_TRUE(support::fails(ErrorKind::kIo, {"another rank could not connect 3 times"},
                                 [&] { make_together("group", world, 1, 2, make); }));
    EXPECT_EQ(tries, 3);
  });
}

TEST(MakeTogether, DoesNotTryAgainWhereARankHasFailed) {
  run_ranks(2, {}, [](World& world) {
    int tries = 0;
    const auto make = [&](const auto&) {
      ++tries;
      throw Error(ErrorKind::kIo, "a rank has failed");
    };
    EXPECT_TRUE(support::fails(ErrorKind::kIo, {"a rank has failed"},
                               [&] { make_together("group", world, world.rank(), 2, make); }));
    EXPECT_EQ(tries, 1);
  });
}

TEST(ProcessGroup, SumsInTheOrderOfRanksAndInFp32) {
  run_ranks(2, {}, [](World& world) {
    const ProcessGroup group(world, "all", first_ranks(2));
    // 1 + 2^-8 is between two bf16: summed in fp32 and rounded once.
    const auto mine = world.rank() == 0 ? at::full({4}, 1.0).to(at::kBFloat16)
                                        : at::full({4}, 0.015625).to(at::kBFloat16);
    const auto expected = at::full({4}, 1.015625).to(at::kBFloat16);
    EXPECT_TRUE(at::equal(group.all_reduce(mine), expected));
    EXPECT_TRUE(at::equal(group.reduce_scatter(mine), expected.slice(0, 0, 2)));
    EXPECT_EQ(group.all_reduce_max(at::full({1}, world.rank())).item<int>(), 1);
  });
}

TEST(ProcessGroup, NamesTheRankThatNeverComes) {
  World::Options options{.timeout = std::chrono::milliseconds(1500)};
  try {
    run_ranks(3, options, [](World& world) {
      const ProcessGroup group(world, "mesh/tp", first_ranks(3));
      group.barrier();
      if (world.rank() == 1) return std::this_thread::sleep_for(std::chrono::seconds(5));
      (void)group.all_gather(at::ones({4}));
    });
    FAIL() << "the collective ended";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kIo);
    const std::string what = error.what();
    EXPECT_NE(what.find("mesh/tp"), std::string::npos) << what;
    EXPECT_NE(what.find("all_gather"), std::string::npos) << what;
    EXPECT_NE(what.find("missing: rank 1 "), std::string::npos) << what;
  }
}

// A rank that fails before its group is made leaves others who wait for it in the store.
TEST(ProcessGroup, RepeatsWhyARankNeverComesToMakeIt) {
  run_ranks(2, {.timeout = std::chrono::minutes(5)}, [](World& world) {
    if (world.rank() == 1)
      return announce_failure(world, Error(ErrorKind::kIo, "out of memory for all it has"));
    EXPECT_TRUE(support::fails(
        ErrorKind::kIo,
        {"mesh/dp of ranks 0, 1: creation", "rank 1, which failed: out of memory for all it has"},
        [&] { ProcessGroup(world, "mesh/dp", first_ranks(2)); }));
  });
}

TEST(MeshShape, NumbersRanksAsMegatronDoes) {
  // Megatron-Core RankGenerator(tp=2, ep=1, dp=2, pp=2, cp=1, order="tp-cp-ep-dp-pp"), and experts
  // of ep=4, etp=1.
  const MeshShape mesh({.tensor_model_parallel_size = 2,
                        .pipeline_model_parallel_size = 2,
                        .expert_model_parallel_size = 4,
                        .expert_tensor_parallel_size = 1},
                       8);
  EXPECT_EQ(mesh.dp(), 2);
  EXPECT_EQ(mesh.edp(), 1);
  EXPECT_EQ(mesh.coordinates(0), MeshCoordinates{});
  EXPECT_EQ(mesh.coordinates(3), (MeshCoordinates{.tp = 1, .dp = 1, .ep = 3}));
  EXPECT_EQ(mesh.coordinates(6), (MeshCoordinates{.tp = 0, .dp = 1, .pp = 1, .ep = 2}));
}

TEST(MeshShape, RefusesSizesThatDoNotFit) {
  EXPECT_THROW(MeshShape({.tensor_model_parallel_size = 3}, 8), Error);
  EXPECT_THROW(MeshShape({.expert_model_parallel_size = 3}, 4), Error);
}

TEST(ParallelState, MeshesOfOtherShapesLiveSideBySide) {
  run_ranks(4, {}, [](World& world) {
    const ParallelState wide(world, {.tensor_model_parallel_size = 4}, "wide");
    const ParallelState deep(
        world, {.tensor_model_parallel_size = 2, .pipeline_model_parallel_size = 2}, "deep");
    EXPECT_EQ(wide.tp().size(), 4);
    EXPECT_EQ(deep.tp().ranks(),
              (world.rank() < 2 ? std::vector<int>{0, 1} : std::vector<int>{2, 3}));
    EXPECT_EQ(deep.pp().ranks(), (std::vector<int>{world.rank() % 2, world.rank() % 2 + 2}));
    const auto sum = [&](const ProcessGroup& group) {
      return group.all_reduce(at::full({1}, world.rank(), at::kLong)).item<int>();
    };
    EXPECT_EQ(sum(wide.tp()), 6);
    EXPECT_EQ(sum(deep.tp()), world.rank() < 2 ? 1 : 5);
    EXPECT_EQ(sum(deep.all()), 6);
  });
}

TEST(ParallelState, IsOverAnyRanksNumberedAsIfTheyWereAll) {
  run_ranks(4, {}, [](World& world) {
    const auto sum = [&](const ProcessGroup& group) {
      return group.all_reduce(at::full({1}, world.rank(), at::kLong)).item<int>();
    };
    if (world.rank() == 1) {
      const ParallelState alone(world, {}, "alone", {1});
      EXPECT_EQ(alone.coordinates(), MeshCoordinates{});
      EXPECT_EQ(sum(alone.all()), 1);
      EXPECT_THROW(ParallelState(world, {}, "of others", {0, 2}), Error);
      EXPECT_THROW(ParallelState(world, {}, "not ascending", {2, 1}), Error);
      EXPECT_THROW(ParallelState(world, {}, "twice", {1, 1}), Error);
      EXPECT_THROW(ParallelState(world, {}, "beyond", {1, 4}), Error);
      EXPECT_THROW(ParallelState(world, {.tensor_model_parallel_size = 2}, "too few", {1}), Error);
      return;
    }
    const ParallelState three(world, {.pipeline_model_parallel_size = 3}, "three", {0, 2, 3});
    EXPECT_EQ(three.shape().world_size(), 3);
    EXPECT_EQ(three.coordinates().pp, std::max(world.rank() - 1, 0));
    EXPECT_EQ(three.pp().ranks(), (std::vector<int>{0, 2, 3}));
    EXPECT_EQ(three.tp().ranks(), std::vector<int>{world.rank()});
    EXPECT_EQ(sum(three.all()), 5);
    EXPECT_EQ(three.pp().broadcast(at::full({1}, world.rank(), at::kLong), 2).item<int>(), 3);
  });
}

}  // namespace process_group_test
}  // namespace ferry::models
