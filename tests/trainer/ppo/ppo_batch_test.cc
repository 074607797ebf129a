#include "trainer/ppo/ppo_batch.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
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
  const auto* const begin = tensor.const_data_ptr<std::int64_t>();
  return {begin, begin + tensor.numel()};
}

// Responses of these lengths to a prompt of a token, in groups of two.
RolloutBatch batch_of(const Numbers& lengths) {
  std::vector<RolloutBatch::Tokens> responses;
  for (const auto length : lengths) responses.emplace_back(static_cast<std::size_t>(length), 1);
  auto batch = RolloutBatch::of(std::vector<RolloutBatch::Tokens>(lengths.size(), {1}), responses);
  batch.max_response_length = *std::ranges::max_element(lengths);
  for (std::size_t row = 0; row < lengths.size(); ++row) {
    batch.uid.push_back("group " + std::to_string(row / 2));
    batch.data_source.emplace_back("counting");
  }
  return batch;
}

TEST(PromptBatch, RowsOfAPromptFollowEachOtherAndHaveOneUid) {
  const auto batch = prompt_batch(prompts(3), {}, {.n = 2, .uid_prefix = "7-", .key = 1});
  EXPECT_EQ(batch.uid, (std::vector<std::string>{"7-0", "7-0", "7-1", "7-1", "7-2", "7-2"}));
  EXPECT_EQ(batch.ground_truth, (std::vector<nlohmann::json>{0, 0, 1, 1, 2, 2}));
  EXPECT_EQ(group_index(batch), (Numbers{0, 0, 1, 1, 2, 2}));
  EXPECT_EQ(batch.lengths(), (Numbers{1, 1, 2, 2, 3, 3}));
}

// A row's draws are its own, whichever rank has it and whatever else is in the batch.
TEST(PromptBatch, SeedsAreThoseOfTheRow) {
  const auto of = [](std::size_t count, std::uint64_t key) {
    return numbers(prompt_batch(prompts(count), {}, {.n = 4, .key = key}).seeds);
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

TEST(AtLastToken, PutsAScoreBehindEachResponse) {
  const auto batch = batch_of({2, 1, 3});
  EXPECT_TRUE(at::equal(at_last_token(at::tensor({0.5, -1.0, 2.0}), batch),
                        at::tensor({0.F, .5F, -1.F, 0.F, 0.F, 2.F})));
}

// The end of a response is where it ends, not where the mask does.
TEST(AtLastToken, DoesNotDependOnTheMask) {
  auto batch = batch_of({3, 2});
  batch.response_mask = at::tensor({1, 0, 0, 0, 1}).to(at::kBool);
  EXPECT_TRUE(at::equal(at_last_token(at::tensor({1.0, 2.0}), batch),
                        at::tensor({0.F, 0.F, 1.F, 0.F, 2.F})));
}

TEST(AtLastToken, AResponseWithoutATokenHasNone) {
  EXPECT_TRUE(
      at::equal(at_last_token(at::tensor({1.0, 2.0}), batch_of({0, 1})), at::tensor({2.F})));
}

TEST(VariedGroups, KeepsThoseWhoseAnswersDiffer) {
  auto batch = batch_of({1, 1, 1, 1, 1, 1});
  const auto extras = [](const std::vector<double>& scores) {
    std::vector<nlohmann::json> all;
    for (const auto score : scores) all.push_back({{"score", score}, {"acc", 1}, {"pred", "x"}});
    return all;
  };
  batch.reward_extra_info = extras({0, 1, 0.5, 0.5, 1, 0});
  EXPECT_EQ(varied_groups(batch, "score").uid,
            (std::vector<std::string>{"group 0", "group 0", "group 2", "group 2"}));
  EXPECT_EQ(varied_groups(batch, "acc").size(), 0);
  EXPECT_TRUE(support::fails(ErrorKind::kUsage,
                             {"filter_groups.metric", "counting", "no number pred"},
                             [&] { (void)varied_groups(batch, "pred"); }));
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"no number f1"},
                             [&] { (void)varied_groups(batch, "f1"); }));
}

// All of a reward makes advantages: what a form earns and the penalty for length as well.
TEST(VariedGroups, KeepsThoseThatHaveAnAdvantage) {
  auto batch = batch_of({2, 2, 2, 2, 0, 2});
  batch.reward_extra_info.assign(6, nlohmann::json::object({{"score", 1.0}}));
  batch.scores = at::tensor({1.F, 1.F, 0.5F, 1.F, 7.F, 0.F});  // no token earns the 7
  const std::vector<std::string> kept{"group 1", "group 1"};
  for (const char* metric : {"reward", "seq_reward", "seq_final_reward"})
    EXPECT_EQ(varied_groups(batch, metric).uid, kept) << metric;
  EXPECT_EQ(varied_groups(batch, "score").size(), 0);
}

}  // namespace ppo_batch_test
}  // namespace ferry::trainer
