#include "trainer/ppo/ppo_metrics.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "distckpt/base/error.h"
#include "models/spec/costs.h"
#include "tests/support/expect.h"
#include "trainer/metrics/performance.h"

namespace ferry::trainer {
namespace ppo_metrics_test {

using support::fails;

// Prompts of 2 and 3 tokens, of 3 at most; the same of responses: one is whole, of two tokens, one
// was cut off at the limit, of the last there is nothing.
RolloutBatch three_rows() {
  auto batch = RolloutBatch::of(std::vector<RolloutBatch::Tokens>{{1, 1}, {1, 1, 1}, {1, 1, 1}},
                                std::vector<RolloutBatch::Tokens>{{1, 1}, {1, 1, 1}, {}});
  batch.max_prompt_length = batch.max_response_length = 3;
  batch.token_level_scores = at::tensor({0.F, 1.F, 0.F, 0.F, 3.F});
  batch.token_level_rewards = at::tensor({0.F, .5F, 0.F, 0.F, .5F});
  batch.advantages = at::tensor({0.F, 1.F, 3.F, 4.F, 5.F});
  batch.returns = at::ones({5}) * 2;
  return batch;
}

TEST(MfuMetrics, AreOfThePartsThatTookTime) {
  models::TransformerConfig config;
  config.num_layers = 1;
  config.hidden_size = 2;
  config.ffn_hidden_size = 3;
  config.num_attention_heads = 1;
  config.num_query_groups = 1;
  config.kv_channels = 2;
  config.vocab_size = 5;
  const auto flops = models::training_flops(config, std::array<std::int64_t, 3>{4, 6, 3});
  const auto found =
      mfu_metrics(three_rows(), config,
                  {.seconds = {{"update_actor", 4}, {"old_log_prob", 0.5}, {"gen", 9}},
                   .ppo_epochs = 2,
                   .peak_flops = 100});
  EXPECT_EQ(found, (Metrics{{"perf/mfu/actor", flops * 2 / 400},
                            {"perf/mfu/actor_infer", flops / 3 / 50}}));
  EXPECT_TRUE(mfu_metrics(three_rows(), config, {.peak_flops = 1}).empty());
}

TEST(DataMetrics, LeaveOutResponsesWithoutAToken) {
  const auto found = compute_data_metrics(three_rows());
  EXPECT_EQ(found.at("critic/score/mean"), 2);
  EXPECT_EQ(found.at("critic/score/min"), 1);
  EXPECT_EQ(found.at("critic/rewards/max"), 0.5);
  EXPECT_EQ(found.at("critic/advantages/max"), 5);
  EXPECT_NEAR(found.at("response/aborted_ratio"), 1.0 / 3, 1e-7);
  EXPECT_EQ(found.at("response_length/min"), 0);
  EXPECT_EQ(found.at("response_length_non_aborted/min"), 2);
  EXPECT_EQ(found.at("response_length_non_aborted/clip_ratio"), 0.5);
  EXPECT_NEAR(found.at("prompt_length/clip_ratio"), 2.0 / 3, 1e-7);
  EXPECT_FALSE(found.contains("critic/values/mean"));
  EXPECT_FALSE(found.contains("critic/vf_explained_var"));
}

TEST(DataMetrics, SayHowMuchOfTheReturnsValuesExplain) {
  auto batch = three_rows();
  batch.returns = batch.advantages;
  batch.values = batch.advantages + 7;  // all of their variance
  EXPECT_EQ(compute_data_metrics(batch).at("critic/vf_explained_var"), 1);
  EXPECT_EQ(compute_data_metrics(batch).at("critic/values/min"), 7);
}

TEST(DataMetrics, OfABatchWithoutAnyTokenAreNotNumbers) {
  auto batch = three_rows().slice(2, 3);
  batch.values = batch.returns;
  const auto found = compute_data_metrics(batch);
  for (const char* name : {"critic/score/mean", "critic/returns/max", "critic/values/min",
                           "critic/vf_explained_var", "response_length_non_aborted/clip_ratio"})
    EXPECT_TRUE(std::isnan(found.at(name))) << name;
  EXPECT_EQ(found.at("response/aborted_ratio"), 1);
  EXPECT_EQ(found.at("response_length/mean"), 0);
}

TEST(DataMetrics, NameAColumnThatIsMissing) {
  auto batch = three_rows();
  batch.returns = at::Tensor();
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"returns"}, [&] { compute_data_metrics(batch); }));
}

TEST(DebugMetrics, AreZeroWhereRolloutAndTrainerAgree) {
  auto batch = three_rows();
  batch.old_log_probs = batch.rollout_log_probs = at::arange(5, at::kFloat) * -0.25;
  auto found = calculate_debug_metrics(batch);
  EXPECT_EQ(found.at("training/rollout_probs_diff_valid"), 1);
  for (const char* what : {"max", "mean", "std"})
    EXPECT_EQ(found.at(std::string("training/rollout_probs_diff_") + what), 0);
  EXPECT_NEAR(found.at("training/rollout_actor_probs_pearson_corr"), 1, 1e-6);

  batch.response_mask = at::zeros({5}, at::kBool);
  found = calculate_debug_metrics(batch);
  EXPECT_EQ(found.at("training/rollout_probs_diff_valid"), 0);
  EXPECT_TRUE(std::isnan(found.at("training/rollout_probs_diff_max")));
}

TEST(TokenCounts, AreThoseOfAllRows) {
  const auto counts = count_tokens(three_rows());
  EXPECT_EQ(counts.prompt, 8);
  EXPECT_EQ(counts.response, 5);
}

}  // namespace ppo_metrics_test
}  // namespace ferry::trainer
