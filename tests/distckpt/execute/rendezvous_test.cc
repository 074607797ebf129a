#include "distckpt/execute/rendezvous.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/temp_dir.h"

namespace ferry::distckpt {
namespace rendezvous_test {

using support::fails;
using support::TempDir;

RendezvousOptions quick() {
  return {.patience = std::chrono::seconds(20),
          .silence = std::chrono::seconds(4),
          .heartbeat = std::chrono::milliseconds(50)};
}

// Runs body(rank) on as many threads; what each threw.
std::vector<std::string> run_ranks(int size, const std::function<void(int)>& body) {
  std::vector<std::string> errors(static_cast<std::size_t>(size));
  std::vector<std::jthread> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const Error& error) {
        errors[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  }
  ranks.clear();
  return errors;
}

TEST(Rendezvous, AllWaitForAllAtEachBarrier) {
  const TempDir folder;
  constexpr int kSize = 4;
  std::atomic<int> before = 0;
  const auto errors = run_ranks(kSize, [&](int rank) {
    std::this_thread::sleep_for(std::chrono::milliseconds(30 * rank));
    Rendezvous ranks(folder.path() / "ranks", {.rank = rank, .size = kSize}, "same", quick());
    for (int round = 1; round <= 5; ++round) {
      ++before;
      ranks.barrier("round" + std::to_string(round));
      EXPECT_GE(before, kSize * round);
    }
  });
  EXPECT_EQ(errors, std::vector<std::string>(kSize));
}

TEST(Rendezvous, WhatAnEarlierRunLeftDoesNotCount) {
  const TempDir folder;
  const auto ranks_folder = folder.path() / "ranks";
  for (int run = 0; run < 8; ++run) {  // all but the first find hellos and a session
    const auto errors = run_ranks(3, [&](int rank) {
      // They come one after the other, in another order each time: sessions with some words of the
      // earlier run are made, and joined by those whose words are in them.
      std::this_thread::sleep_for(std::chrono::milliseconds(60 * ((rank + run) % 3)));
      Rendezvous ranks(ranks_folder, {.rank = rank, .size = 3}, "same", quick());
      ranks.barrier("copied");
    });
    EXPECT_EQ(errors, std::vector<std::string>(3));
  }
}

TEST(Rendezvous, TheFolderMayGoOnceAllHaveLeft) {
  const TempDir folder;
  for (int run = 0; run < 20; ++run) {
    const auto errors = run_ranks(4, [&](int rank) {
      Rendezvous ranks(folder.path() / "ranks", {.rank = rank, .size = 4}, "same", quick());
      ranks.leave("proved");
      if (rank == 0) std::filesystem::remove_all(folder.path() / "ranks");
    });
    EXPECT_EQ(errors, std::vector<std::string>(4));
  }
}

TEST(Rendezvous, ARankThatHasLeftIsNotMissed) {
  const TempDir folder;
  const auto errors = run_ranks(3, [&](int rank) {
    Rendezvous ranks(folder.path(), {.rank = rank, .size = 3}, "same", quick());
    if (rank == 2) std::this_thread::sleep_for(std::chrono::seconds(6));  // longer than silence
    ranks.leave("proved");
  });
  EXPECT_EQ(errors, std::vector<std::string>(3));
}

TEST(Rendezvous, AFailureReachesAll) {
  const TempDir folder;
  const auto errors = run_ranks(3, [&](int rank) {
    Rendezvous ranks(folder.path(), {.rank = rank, .size = 3}, "same", quick());
    if (rank == 2) return ranks.fail("the disk is full");
    ranks.barrier("copied");
  });
  for (int rank = 0; rank < 2; ++rank)
    EXPECT_EQ(errors[static_cast<std::size_t>(rank)], "rank 2 failed: the disk is full");
}

TEST(Rendezvous, ASilentRankIsNamed) {
  const TempDir folder;
  const auto errors = run_ranks(3, [&](int rank) {
    Rendezvous ranks(folder.path(), {.rank = rank, .size = 3}, "same", quick());
    if (rank == 1) return;  // its heart stops with it
    ranks.barrier("copied");
  });
  EXPECT_EQ(errors[0], "rank 1 of 3 has fallen silent");
  EXPECT_FALSE(errors[2].empty());
}

TEST(Rendezvous, RanksThatDoNotComeAreNamed) {
  const TempDir folder;
  auto options = quick();
  options.patience = std::chrono::milliseconds(300);
  options.notice = std::chrono::milliseconds(100);
  std::vector<int> late;
  options.late = [&](int rank) { late.push_back(rank); };
  EXPECT_TRUE(fails(ErrorKind::kCancelled, {"of 3 ranks", "1, 2"},
                    [&] { Rendezvous(folder.path(), {.rank = 0, .size = 3}, "same", options); }));
  EXPECT_EQ(late, std::vector<int>{1});  // once
  EXPECT_TRUE(fails(ErrorKind::kCancelled, {"rank 1 of 3", "rank 0"}, [&] {
    Rendezvous(folder.path() / "never", {.rank = 1, .size = 3}, "same", options);
  }));
}

TEST(Rendezvous, OthersCommandsAreRefused) {
  const TempDir folder;
  const auto errors = run_ranks(2, [&](int rank) {
    Rendezvous ranks(folder.path(), {.rank = rank, .size = 2}, rank == 0 ? "a" : "b", quick());
    ranks.barrier("copied");
  });
  EXPECT_EQ(errors[1], "rank 1 was not given what rank 0 was");
  EXPECT_NE(errors[0].find("rank 1 failed"), std::string::npos) << errors[0];
}

TEST(Rendezvous, LaunchersAreRecognised) {
  const char* const names[] = {
      "RANK",        "WORLD_SIZE",           "OMPI_COMM_WORLD_RANK", "PMI_RANK",
      "PMI_SIZE",    "OMPI_COMM_WORLD_SIZE", "SLURM_PROCID",         "SLURM_STEP_NUM_TASKS",
      "SLURM_NTASKS"};
  const auto with = [&](const std::vector<std::pair<const char*, const char*>>& values) {
    for (const auto* name : names) ::unsetenv(name);
    for (const auto& [name, value] : values) ::setenv(name, value, 1);
    return rank_from_environment();
  };
  EXPECT_EQ(with({}).size, 1);
  EXPECT_EQ(with({{"RANK", "2"}, {"WORLD_SIZE", "4"}}).rank, 2);
  EXPECT_EQ(with({{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "3"}}).size, 3);
  EXPECT_EQ(with({{"SLURM_PROCID", "5"}, {"SLURM_STEP_NUM_TASKS", "8"}}).rank, 5);
  EXPECT_EQ(with({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}}).size, 1);  // a batch script
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"RANK=4", "WORLD_SIZE=4"}, [&] {
    with({{"RANK", "4"}, {"WORLD_SIZE", "4"}});
  }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"WORLD_SIZE=many"}, [&] {
    with({{"RANK", "0"}, {"WORLD_SIZE", "many"}});
  }));
  for (const auto* name : names) ::unsetenv(name);
}

}  // namespace rendezvous_test
}  // namespace ferry::distckpt
