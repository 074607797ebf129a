#include "trainer/ppo/ppo_batch.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "tests/support/expect.h"

namespace ferry::trainer {
namespace ppo_batch_test {

using Numbers = std::vector<std::int64_t>;

std::vector<EncodedPrompt> prompts(std::size_t count) {
  std::vector<EncodedPrompt> all;
  for (std::size_t i = 0; i < count; ++i) {
    EncodedPrompt prompt{.tokens = Numbers(1 + i % 3, static_cast<std::int64_t>(i))};
    prompt.example.data_source = "counting";
    prompt.example.reward_model.ground_truth = i;
    all.push_back(std::move(prompt));
  }
  return all;
}

Numbers numbers(const at::Tensor& tensor) {
  const auto whole = tensor.contiguous();
  const auto* const begin = whole.const_data_ptr<std::int64_t>();
  return {begin, begin + whole.numel()};
}

// A batch whose rows have these lengths, in groups of two.
DataProto batch_of(const Numbers& lengths) {
  const auto rows = static_cast<std::int64_t>(lengths.size());
  auto mask = at::zeros({rows, *std::ranges::max_element(lengths)}, at::kLong);
  std::vector<nlohmann::json> uids;
  for (std::int64_t row = 0; row < rows; ++row) {
    mask[row].narrow(0, 0, lengths[static_cast<std::size_t>(row)]).fill_(1);
    uids.emplace_back("group " + std::to_string(row / 2));
  }
  return DataProto({{"attention_mask", mask}}, {{"uid", uids}});
}

TEST(PromptBatch, RowsOfAPromptFollowEachOtherAndHaveOneUid) {
  const auto batch = prompt_batch(prompts(3), {.n = 2, .width = 4, .uid_prefix = "7-", .key = 1});
  const auto uids = batch.column("uid");
  EXPECT_EQ(uids, (std::vector<nlohmann::json>{"7-0", "7-0", "7-1", "7-1", "7-2", "7-2"}));
  EXPECT_EQ(batch.column("ground_truth"), (std::vector<nlohmann::json>{0, 0, 1, 1, 2, 2}));
  EXPECT_EQ(group_index(batch), (Numbers{0, 0, 1, 1, 2, 2}));
  EXPECT_EQ(numbers(batch.tensor("attention_mask").sum(1)), (Numbers{1, 1, 2, 2, 3, 3}));
}

// A row's draws are its own, whichever rank has it and whatever else is in the batch.
TEST(PromptBatch, SeedsAreThoseOfTheRow) {
  const auto of = [](std::size_t count, std::uint64_t key) {
    return numbers(prompt_batch(prompts(count), {.n = 4, .width = 4, .key = key}).tensor("seeds"));
  };
  const auto seeds = of(8, 1);
  EXPECT_EQ((std::set(seeds.begin(), seeds.end()).size()), seeds.size());
  EXPECT_GE(std::ranges::min(seeds), 0);
  const auto fewer = of(3, 1);
  EXPECT_TRUE(std::equal(fewer.begin(), fewer.end(), seeds.begin()));
  EXPECT_EQ(of(8, 1), seeds);
  const auto others = of(8, 2);
  for (std::size_t i = 0; i < seeds.size(); ++i) EXPECT_NE(others[i], seeds[i]);
}

TEST(AtLastToken, PutsAScoreBehindEachAnswer) {
  const auto mask = at::tensor({1, 1, 0, 1, 0, 0, 1, 1, 1}, at::kLong).view({3, 3});
  const auto column = at_last_token(at::tensor({0.5, -1.0, 2.0}), mask);
  EXPECT_TRUE(
      at::equal(column, at::tensor({0.F, .5F, 0.F, -1.F, 0.F, 0.F, 0.F, 0.F, 2.F}).view({3, 3})));
}

TEST(VariedGroups, KeepsThoseWhoseAnswersDiffer) {
  auto batch = batch_of({1, 1, 1, 1, 1, 1});
  const auto extras = [](const std::vector<double>& scores) {
    std::vector<nlohmann::json> all;
    for (const auto score : scores) all.push_back({{"score", score}, {"acc", 1}, {"pred", "x"}});
    return all;
  };
  batch.set("reward_extra_info", extras({0, 1, 0.5, 0.5, 1, 0}));
  batch.set("data_source", std::vector<nlohmann::json>(6, "counting"));
  EXPECT_EQ(varied_groups(batch, "score").column("uid"),
            (std::vector<nlohmann::json>{"group 0", "group 0", "group 2", "group 2"}));
  EXPECT_EQ(varied_groups(batch, "acc").size(), 0);
  EXPECT_TRUE(support::fails(ErrorKind::kUsage,
                             {"filter_groups.metric", "counting", "no number pred"},
                             [&] { (void)varied_groups(batch, "pred"); }));
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"no number f1"},
                             [&] { (void)varied_groups(batch, "f1"); }));
}

// All of a reward makes advantages: what a form earns and the penalty for length as well.
TEST(VariedGroups, KeepsThoseThatHaveAnAdvantage) {
  auto batch = batch_of({1, 1, 1, 1, 1, 1});
  batch.set("reward_extra_info",
            std::vector<nlohmann::json>(6, nlohmann::json::object({{"score", 1.0}})));
  batch.set("data_source", std::vector<nlohmann::json>(6, "counting"));
  batch.set("token_level_scores",
            at::tensor({1.F, 0.F, 1.F, 0.F, 0.5F, 0.F, 0.F, 1.F, 0.F, 1.F, 1.F, 0.F}).view({6, 2}));
  const std::vector<nlohmann::json> kept{"group 1", "group 1"};
  for (const char* metric : {"reward", "seq_reward", "seq_final_reward"})
    EXPECT_EQ(varied_groups(batch, metric).column("uid"), kept) << metric;
  EXPECT_EQ(varied_groups(batch, "score").size(), 0);
}

TEST(ShuffledEpochs, HaveEveryRowOncePerEpochInAnOrderOfItsOwn) {
  Numbers lengths(24);
  std::iota(lengths.begin(), lengths.end(), 1);
  const auto lengths_of = [](const DataProto& batch) {
    return numbers(batch.tensor("attention_mask").sum(1));
  };
  const auto shuffled = lengths_of(shuffled_epochs(batch_of(lengths), 3, 7));
  ASSERT_EQ(shuffled.size(), 72U);
  std::set<Numbers> orders{lengths};
  for (std::size_t epoch = 0; epoch < 3; ++epoch) {
    const auto begin = shuffled.begin() + static_cast<std::ptrdiff_t>(24 * epoch);
    Numbers order(begin, begin + 24);
    EXPECT_TRUE(orders.insert(order).second) << epoch;
    std::ranges::sort(order);
    EXPECT_EQ(order, lengths) << epoch;
  }
  EXPECT_EQ(lengths_of(shuffled_epochs(batch_of(lengths), 3, 7)), shuffled);
  EXPECT_NE(lengths_of(shuffled_epochs(batch_of(lengths), 3, 8)), shuffled);
}

// Mini-batches of shuffled rows are the same on any number of data parallel ranks.
TEST(ShuffledEpochs, HaveMiniBatchesThatDoNotDependOnTheRanks) {
  Numbers lengths(24);
  std::iota(lengths.begin(), lengths.end(), 1);
  const auto shuffled = shuffled_epochs(batch_of(lengths), 2, 7);
  std::set<std::vector<std::set<std::int64_t>>> cuts;
  for (const std::int64_t dp : {1, 2, 4}) {
    const auto order = mini_batches_of_ranks(shuffled, 8, dp, true);
    const auto of_rows = numbers(shuffled.reorder(order).tensor("attention_mask").sum(1));
    std::vector<std::set<std::int64_t>> mini_batches(6);
    for (std::int64_t i = 0; i < 48; ++i)
      mini_batches[static_cast<std::size_t>(i % (48 / dp) / (8 / dp))].insert(
          of_rows[static_cast<std::size_t>(i)]);
    cuts.insert(mini_batches);
    EXPECT_EQ(mini_batches.front().size(), 8U);
  }
  EXPECT_EQ(cuts.size(), 1U);
}

TEST(MiniBatchesOfRanks, ArePermutationsThatKeepTheRowsOfEachMiniBatch) {
  std::mt19937 random(1);
  for (const std::int64_t dp : {1, 2, 4}) {
    for (const bool balanced : {false, true}) {
      for (int round = 0; round < 10; ++round) {
        Numbers lengths(24);
        for (auto& length : lengths)
          length = std::uniform_int_distribution<std::int64_t>(1, 90)(random);
        constexpr std::int64_t kMiniBatch = 8;
        const auto order = mini_batches_of_ranks(batch_of(lengths), kMiniBatch, dp, balanced);
        auto sorted = order;
        std::ranges::sort(sorted);
        for (std::size_t i = 0; i < sorted.size(); ++i)
          ASSERT_EQ(sorted[i], static_cast<std::int64_t>(i));
        // Rank r learns from [r * rows, (r + 1) * rows) of the order, a part of a mini-batch at a
        // time.
        const auto of_rank = 24 / dp;
        const auto part = kMiniBatch / dp;
        for (std::int64_t i = 0; i < 24; ++i)
          EXPECT_EQ(order[static_cast<std::size_t>(i)] / kMiniBatch, i % of_rank / part)
              << "dp " << dp << ", place " << i;
        if (dp == 1 && !balanced) {
          EXPECT_EQ(order, sorted);
        }
      }
    }
  }
}

TEST(MiniBatchesOfRanks, BalancedPartsHaveAboutTheSameWork) {
  const auto batch = batch_of({90, 80, 70, 60, 1, 2, 3, 4});
  const auto tokens = [&](const Numbers& order) {
    const auto lengths =
        numbers(batch.reorder(order).tensor("attention_mask").sum(1).view({2, 4}).sum(1));
    return std::abs(lengths[0] - lengths[1]);
  };
  EXPECT_LE(tokens(mini_batches_of_ranks(batch, 8, 2, true)), 2);
  EXPECT_EQ(tokens(mini_batches_of_ranks(batch, 8, 2, false)), 290);
}

TEST(MiniBatchesOfRanks, RefuseWhatDoesNotComeOutEven) {
  const auto batch = batch_of({1, 2, 3, 4, 5, 6});
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"6 answers", "mini-batches of 4"},
                             [&] { (void)mini_batches_of_ranks(batch, 4, 2, true); }));
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"4 data parallel ranks"},
                             [&] { (void)mini_batches_of_ranks(batch, 6, 4, true); }));
}

}  // namespace ppo_batch_test
}  // namespace ferry::trainer
