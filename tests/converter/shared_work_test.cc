#include "converter/shared_work.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/temp_dir.h"

namespace ferry::converter {
namespace shared_work_test {

using support::TempDir;

constexpr int kRanks = 3;

void on_all_ranks(const TempDir& dir, const std::function<void(SharedWork&, int)>& body) {
  std::vector<std::jthread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      SharedWork shared({.rank = rank, .size = kRanks}, dir.path());
      body(shared, rank);
    });
  }
}

TEST(SharedWork, ARankThatIsAloneMakesAndActsAtOnce) {
  const TempDir dir;
  SharedWork shared({}, dir.path());
  int made = 0;
  shared.meet({}, {}, [&] { ++made; });
  shared.by_first("written", [&] { ++made; });
  EXPECT_TRUE(shared.is_alone());
  EXPECT_EQ(made, 2);
}

TEST(SharedWork, RankZeroMakesBeforeTheOthers) {
  const TempDir dir;
  std::atomic<bool> made = false;
  on_all_ranks(dir, [&](SharedWork& shared, int rank) {
    shared.meet({}, {}, [&] {
      if (rank == 0) made = true;
      EXPECT_TRUE(made) << rank;
    });
  });
}

TEST(SharedWork, TheOthersWaitForTheActOfRankZero) {
  const TempDir dir;
  std::atomic<int> acts = 0;
  on_all_ranks(dir, [&](SharedWork& shared, int) {
    shared.meet({}, {}, [] {});
    shared.by_first("written", [&] { ++acts; });
    EXPECT_EQ(acts, 1);
  });
}

TEST(SharedWork, OneRankFailsForAll) {
  const TempDir dir;
  std::atomic<int> told = 0;
  on_all_ranks(dir, [&](SharedWork& shared, int rank) {
    shared.meet({}, {}, [] {});
    if (rank == 1) return shared.fail("the disk is full");
    try {
      shared.barrier("copied");
    } catch (const Error& error) {
      told += error.report().find("the disk is full") != std::string::npos;
    }
  });
  EXPECT_EQ(told, kRanks - 1);
}

TEST(SharedWork, EachRankHasAJournalOfItsOwn) {
  const TempDir dir;
  EXPECT_EQ(SharedWork({}, dir.path()).journal("journal"), dir / "journal");
  EXPECT_EQ(SharedWork({.rank = 2, .size = 3}, dir.path()).journal("journal"), dir / "journal.2");
}

TEST(SharedWork, FindsTheJournalsThatOtherRanksLeft) {
  const TempDir dir;
  for (const auto* name : {"journal", "journal.1", "journal.7", "journals", "proof.1"})
    distckpt::write_text(dir / name, "");
  auto others = SharedWork({.rank = 1, .size = 2}, dir.path()).other_journals("journal");
  std::ranges::sort(others);
  EXPECT_EQ(others, (std::vector<std::filesystem::path>{dir / "journal", dir / "journal.7"}));
}

TEST(SharedWork, EachRankDoesItsShare) {
  const TempDir dir;
  distckpt::ExecutorOptions options;
  SharedWork({.rank = 1, .size = 3}, dir.path()).limit(options);
  EXPECT_EQ(options.share, 1);
  EXPECT_EQ(options.num_shares, 3);
}

}  // namespace shared_work_test
}  // namespace ferry::converter
