// Advantages of turns, by hand: two answers to one prompt, of two turns each.
#include "trainer/algorithms/turn_advantages.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "tests/support/expect.h"

namespace ferry::trainer {
namespace turn_advantages_test {

// Columns: a turn of two tokens, one of the environment, a turn of one token.
struct Answers {
  std::vector<std::int64_t> index{0, 0};
  at::Tensor responses = at::tensor({5, 6, 7, 8, 5, 6, 9, 8}, at::kLong).view({2, 4});
  at::Tensor turn_mask = at::tensor({1, 1, 0, 1, 1, 1, 0, 1}, at::kLong).view({2, 4});
  at::Tensor rewards = at::tensor({0.F, 1.F, 0.F, 3.F, 0.F, 0.F, 0.F, 2.F}).view({2, 4});

  AdvantageInputs inputs() const {
    return {.token_level_rewards = rewards,
            .response_mask = turn_mask,
            .index = index,
            .prompts = {{1, 2}, {1, 2}},
            .responses = responses,
            .turn_mask = turn_mask};
  }
};

TEST(GrpoTurns, SumsTheNormalizedRewardsOfATurnAndThoseBehindIt) {
  const Answers answers;
  const auto advantages =
      grpo_turns_advantage(answers.inputs(), {.norm_adv_by_std_in_grpo = false});
  // Rewards of turns: 1, 3 and 0, 2; their mean is 1.5.
  const auto expected = at::tensor({1.F, 1.F, 0.F, 1.5F, -1.F, -1.F, 0.F, 0.5F}).view({2, 4});
  EXPECT_TRUE(at::allclose(advantages, expected)) << advantages;
}

TEST(GrpoTurns, DividesByTheDeviationOfTheGroup) {
  const Answers answers;
  const auto plain = grpo_turns_advantage(answers.inputs(), {.norm_adv_by_std_in_grpo = false});
  const auto divided = grpo_turns_advantage(answers.inputs(), {.norm_adv_by_std_in_grpo = true});
  // The variance of 1, 3, 0, 2, divided by three, is 5/3.
  EXPECT_TRUE(at::allclose(divided, plain / std::sqrt(5.0 / 3), 1e-5));
}

TEST(Gigpo, ComparesAnswersAndTurnsThatHaveSeenTheSame) {
  const Answers answers;
  const auto advantages = gigpo_advantage(
      answers.inputs(),
      {.gamma = 0.5, .gigpo = {.step_advantage_w = 2, .mode = GigpoMode::kMeanNorm}});
  // Answers score 4 and 2: +-1. The first turns have seen the prompt alone: discounted returns 2.5
  // and 1, +-0.75. The second turns have seen different tokens: each is alone.
  const auto expected = at::tensor({2.5F, 2.5F, 0.F, 1.F, -2.5F, -2.5F, 0.F, -1.F}).view({2, 4});
  EXPECT_TRUE(at::allclose(advantages, expected)) << advantages;
}

TEST(Gigpo, ComparesLaterTurnsBehindTheSameWordsOfTheEnvironment) {
  Answers answers;
  answers.responses[1][2] = 7;
  const auto advantages =
      gigpo_advantage(answers.inputs(), {.gamma = 1, .gigpo = {.mode = GigpoMode::kMeanNorm}});
  EXPECT_FLOAT_EQ(advantages[0][3].item<float>(), 1.5F);
  EXPECT_FLOAT_EQ(advantages[1][3].item<float>(), -1.5F);
}

TEST(TurnAdvantages, AreZeroWhereNothingIsLearned) {
  const Answers answers;
  auto inputs = answers.inputs();
  inputs.response_mask = answers.turn_mask.clone();
  inputs.response_mask[0][1] = 0;
  const auto advantages = grpo_turns_advantage(inputs, {});
  EXPECT_EQ(advantages[0][1].item<float>(), 0.0F);
  EXPECT_NE(advantages[0][0].item<float>(), 0.0F);
}

TEST(TurnAdvantages, NeedTheTurns) {
  const Answers answers;
  auto inputs = answers.inputs();
  inputs.turn_mask = at::Tensor();
  EXPECT_TRUE(
      support::fails(ErrorKind::kUsage, {"need the turns"}, [&] { gigpo_advantage(inputs, {}); }));
}

}  // namespace turn_advantages_test
}  // namespace ferry::trainer
