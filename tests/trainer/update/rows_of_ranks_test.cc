#include "trainer/update/rows_of_ranks.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "tests/support/expect.h"

namespace ferry::trainer {
namespace rows_of_ranks_test {

using Numbers = std::vector<std::int64_t>;

// Prompts of these lengths.
RolloutBatch batch_of(const Numbers& lengths) {
  std::vector<RolloutBatch::Tokens> prompts;
  for (const auto length : lengths) prompts.emplace_back(static_cast<std::size_t>(length), 1);
  return RolloutBatch::of(prompts);
}

Numbers ascending(std::int64_t count) {
  Numbers numbers(static_cast<std::size_t>(count));
  std::iota(numbers.begin(), numbers.end(), 1);
  return numbers;
}

TEST(EvenRows, RepeatTheFirstOnesAtTheEnd) {
  EXPECT_EQ(even_rows(5, 2), (RowsOfRanks{{0, 1, 2}, {3, 4, 0}}));
  EXPECT_EQ(even_rows(1, 3), (RowsOfRanks{{0}, {0}, {0}}));
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"0 rows cannot be shared out to 2 ranks"},
                             [] { (void)even_rows(0, 2); }));
}

// Any rows go to ranks and come back, whatever was repeated.
TEST(InOrder, UndoesWhatRanksWereGiven) {
  std::mt19937_64 random(1);
  for (std::int64_t rows = 1; rows < 12; ++rows) {
    for (std::int64_t ranks = 1; ranks < 5; ++ranks) {
      auto batch = batch_of(ascending(rows));
      const auto given = even_rows(rows, ranks);
      RolloutBatch::Rows all;
      for (const auto& of_rank : given) all.insert(all.end(), of_rank.begin(), of_rank.end());
      EXPECT_EQ(in_order(batch.select(all), given).lengths(), batch.lengths());
    }
  }
}

TEST(ShuffledEpochs, HaveEveryRowOncePerEpochInAnOrderOfItsOwn) {
  const auto shuffled = shuffled_epochs(24, 3, 7);
  ASSERT_EQ(shuffled.size(), 72U);
  const auto rows = rows_in_order(24);
  std::set<Numbers> orders{rows};
  for (std::size_t epoch = 0; epoch < 3; ++epoch) {
    const auto begin = shuffled.begin() + static_cast<std::ptrdiff_t>(24 * epoch);
    Numbers order(begin, begin + 24);
    EXPECT_TRUE(orders.insert(order).second) << epoch;
    std::ranges::sort(order);
    EXPECT_EQ(order, rows) << epoch;
  }
  EXPECT_EQ(shuffled_epochs(24, 3, 7), shuffled);
  EXPECT_NE(shuffled_epochs(24, 3, 8), shuffled);
}

// Mini-batches of shuffled rows are the same on any number of data parallel ranks.
TEST(MiniBatchesOfRanks, OfShuffledRowsDoNotDependOnTheRanks) {
  const auto batch = batch_of(ascending(24));
  const auto shuffled = shuffled_epochs(24, 2, 7);
  std::set<std::vector<std::set<std::int64_t>>> cuts;
  for (const std::int64_t dp : {1, 2, 4}) {
    std::vector<std::set<std::int64_t>> mini_batches(6);
    for (const auto& rows : mini_batches_of_ranks(batch, shuffled, 8, dp, true))
      for (std::size_t i = 0; i < rows.size(); ++i)
        mini_batches[i / static_cast<std::size_t>(8 / dp)].insert(rows[i]);
    cuts.insert(mini_batches);
    EXPECT_EQ(mini_batches.front().size(), 8U);
  }
  EXPECT_EQ(cuts.size(), 1U);
}

TEST(MiniBatchesOfRanks, HaveEveryRowOnceInItsMiniBatch) {
  std::mt19937 random(1);
  for (const std::int64_t dp : {1, 2, 4}) {
    for (const bool balanced : {false, true}) {
      for (int round = 0; round < 10; ++round) {
        Numbers lengths(24);
        for (auto& length : lengths)
          length = std::uniform_int_distribution<std::int64_t>(1, 90)(random);
        constexpr std::int64_t kMiniBatch = 8;
        const auto of_ranks =
            mini_batches_of_ranks(batch_of(lengths), rows_in_order(24), kMiniBatch, dp, balanced);
        Numbers all;
        for (const auto& rows : of_ranks) {
          ASSERT_EQ(rows.size(), static_cast<std::size_t>(24 / dp));
          for (std::size_t i = 0; i < rows.size(); ++i)
            EXPECT_EQ(rows[i] / kMiniBatch, static_cast<std::int64_t>(i) / (kMiniBatch / dp))
                << "dp " << dp << ", place " << i;
          all.insert(all.end(), rows.begin(), rows.end());
        }
        if (dp == 1 && !balanced) {
          EXPECT_EQ(all, rows_in_order(24));
        }
        std::ranges::sort(all);
        EXPECT_EQ(all, rows_in_order(24));
      }
    }
  }
}

TEST(MiniBatchesOfRanks, BalancedPartsHaveAboutTheSameWork) {
  const auto batch = batch_of({90, 80, 70, 60, 1, 2, 3, 4});
  const auto difference = [&](bool balanced) {
    Numbers tokens;
    for (const auto& rows : mini_batches_of_ranks(batch, rows_in_order(8), 8, 2, balanced))
      tokens.push_back(batch.select(rows).offsets.back());
    return std::abs(tokens[0] - tokens[1]);
  };
  EXPECT_LE(difference(true), 2);
  EXPECT_EQ(difference(false), 290);
}

TEST(MiniBatchesOfRanks, RefuseWhatDoesNotComeOutEven) {
  const auto batch = batch_of({1, 2, 3, 4, 5, 6});
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"6 answers", "mini-batches of 4"}, [&] {
    (void)mini_batches_of_ranks(batch, rows_in_order(6), 4, 2, true);
  }));
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"4 data parallel ranks"}, [&] {
    (void)mini_batches_of_ranks(batch, rows_in_order(6), 6, 4, true);
  }));
}

}  // namespace rows_of_ranks_test
}  // namespace ferry::trainer
