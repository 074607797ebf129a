#include "trainer/plan/auto_settings.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "tests/support/models/planned_runs.h"
#include "trainer/plan/run_plan.h"

namespace ferry::trainer {
namespace auto_settings_test {

using support::grpo;
using support::llama_8b;
using Granularity = models::Recompute::Granularity;

DeviceSpec gpu_of(std::int64_t gib) {
  auto device = *find_device("H200");
  device.memory = gib << 30;
  return device;
}
DeviceSpec host_of(std::int64_t mib) {
  return {.name = "host", .memory = mib << 20, .on_host = true};
}

PpoConfig chosen(const PpoConfig& config, const DeviceSpec& device, int ranks = 4) {
  return choose_settings(config, {.actor = llama_8b(), .critic = llama_8b()}, ranks, device).config;
}
bool fits(const PpoConfig& config, const DeviceSpec& device, int ranks = 4) {
  return plan_run(setup_of(config, {.actor = llama_8b(), .critic = llama_8b()}, ranks, device))
      .fits();
}

class OfMemory : public testing::TestWithParam<int> {};

TEST_P(OfMemory, FitsAndOneTenthMoreDoesNot) {
  auto config = chosen(grpo(), gpu_of(GetParam()));
  EXPECT_TRUE(fits(config, gpu_of(GetParam())));
  auto& tokens = *config.actor.ppo_max_token_len_per_gpu;
  if (tokens == MicroBatchSize::kUsual) return;  // there is room for more
  tokens = tokens * 11 / 10;
  EXPECT_FALSE(fits(config, gpu_of(GetParam())));
}

INSTANTIATE_TEST_SUITE_P(GiB, OfMemory, testing::Values(84, 90, 100, 120, 140, 180));

TEST(Auto, FitsTheRunThatDied) {
  const auto config = chosen(grpo(), *find_device("H200"));
  EXPECT_GE(config.actor.ppo_max_token_len_per_gpu, 6144);
  EXPECT_LT(config.actor.ppo_max_token_len_per_gpu, 16384);
  EXPECT_EQ(config.actor.megatron.recompute_granularity, Granularity::kNone);
}

// Nothing may rest on the host.
PpoConfig grpo_on_the_device() {
  auto config = grpo();
  config.actor.megatron.optimizer_offload = false;
  config.actor.megatron.grad_offload = false;
  return config;
}

// 128 sequences of 1,060 tokens an update: four micro-batches for each of four stages.
TEST(Auto, LeavesEnoughMicroBatchesForThePipeline) {
  auto config = grpo();
  config.actor.megatron.parallel.pipeline_model_parallel_size = 4;
  EXPECT_EQ(chosen(config, gpu_of(140)).actor.ppo_max_token_len_per_gpu, 8480);
  EXPECT_EQ(chosen(config, gpu_of(140), 8).actor.ppo_max_token_len_per_gpu, 4240) << "half of them";
  EXPECT_EQ(chosen(config, gpu_of(140), 64).actor.ppo_max_token_len_per_gpu, 1060) << "a sequence";
  config.actor.megatron.parallel.virtual_pipeline_model_parallel_size = 2;
  EXPECT_EQ(chosen(config, gpu_of(140), 8).actor.ppo_max_token_len_per_gpu, 8480);
  const auto seconds = [](const PpoConfig& of) {
    return plan_run(setup_of(of, {.actor = llama_8b()}, 64, gpu_of(140))).step_seconds();
  };
  auto longer = chosen(config, gpu_of(140), 64);
  longer.actor.ppo_max_token_len_per_gpu = 4240;
  EXPECT_LT(seconds(chosen(config, gpu_of(140), 64)), seconds(longer));
}

TEST(Auto, ComputesLayersAgainWhereMemoryIsShort) {
  const auto config = chosen(grpo_on_the_device(), gpu_of(82));
  EXPECT_EQ(config.actor.megatron.recompute_granularity, Granularity::kFull);
  EXPECT_GE(config.actor.ppo_max_token_len_per_gpu, 4096);
}

TEST(Auto, ComputesNoMoreLayersAgainThanItHasTo) {
  auto config = chosen(grpo_on_the_device(), gpu_of(82));
  ASSERT_EQ(config.actor.megatron.recompute_method, models::Recompute::Method::kBlock);
  config.actor.ppo_max_token_len_per_gpu = 4096;
  --*config.actor.megatron.recompute_num_layers;
  EXPECT_FALSE(fits(config, gpu_of(82)));
}

// Fewer tokens cost less than layers that are computed again.
TEST(Auto, KeepsAllLayersForHalfOfTheTokens) {
  const auto config = chosen(grpo_on_the_device(), gpu_of(88));
  EXPECT_EQ(config.actor.megatron.recompute_granularity, Granularity::kNone);
  EXPECT_GE(config.actor.ppo_max_token_len_per_gpu, 2048);
  EXPECT_LT(config.actor.ppo_max_token_len_per_gpu, 3900);
}

TEST(Auto, LeavesWhatIsSet) {
  auto config = grpo();
  config.actor.ppo_max_token_len_per_gpu = 20000;
  config.actor.megatron.recompute_granularity = Granularity::kSelective;
  config.actor.megatron.optimizer_offload = true;
  config.actor.megatron.grad_offload = false;
  config.actor.megatron.param_offload = false;
  config.rollout.gpu_memory_utilization = 0.25;
  EXPECT_EQ(chosen(config, gpu_of(140)), config);
}

TEST(Auto, GivesTheRolloutWhatTheActorLeaves) {
  const auto config = chosen(grpo(), gpu_of(140));
  EXPECT_GT(config.rollout.gpu_memory_utilization, 0.8);
  EXPECT_LT(config.rollout.gpu_memory_utilization, 1.0);
}

TEST(Auto, LeavesRoomForTheActorThatTrainsBesideTheCache) {
  auto config = grpo();
  config.rollout.free_cache_engine = false;
  const auto beside = chosen(config, gpu_of(140));
  EXPECT_LT(beside.rollout.gpu_memory_utilization, 0.6);
  EXPECT_TRUE(fits(beside, gpu_of(140)));
}

TEST(Auto, IsOnTheHostWhatItWasWithoutAPlan) {
  const auto config = chosen(grpo(), host_of(1 << 20), 1);
  EXPECT_EQ(config.actor.ppo_max_token_len_per_gpu, MicroBatchSize::kUsual);
  EXPECT_EQ(config.actor.megatron.recompute_granularity, Granularity::kNone);
  EXPECT_EQ(config.rollout.gpu_memory_utilization, std::nullopt);
}

TEST(Auto, ComputesLayersAgainOnAHostWithLittleMemory) {
  const auto host = host_of(220 << 10);
  const auto config = chosen(grpo(), host, 1);
  EXPECT_EQ(config.actor.megatron.recompute_granularity, Granularity::kFull);
  EXPECT_TRUE(fits(config, host, 1));
}

TEST(Auto, ChoosesForACriticOfItsOwn) {
  auto config = grpo();
  config.algorithm.adv_estimator = AdvantageEstimator::kGae;
  const auto both = chosen(config, gpu_of(180), 8);
  EXPECT_TRUE(fits(both, gpu_of(180), 8));
  EXPECT_TRUE(both.critic.ppo_max_token_len_per_gpu.has_value());
  EXPECT_TRUE(both.critic.megatron.recompute_granularity.has_value());
}

TEST(Auto, TakesAsManyTokensAsASequenceOfFineTuningNeeds) {
  SftConfig config;
  config.data.max_length = 3000;
  EXPECT_EQ(
      choose_settings(config, llama_8b(), 1, host_of(1 << 20)).config.data.max_token_len_per_gpu,
      3000);
}

TEST(Auto, TakesMoreTokensThanASequenceNeedsOnAGpu) {
  SftConfig config;
  config.data.max_length = 3000;
  EXPECT_EQ(choose_settings(config, llama_8b(), 8, gpu_of(180)).config.data.max_token_len_per_gpu,
            MicroBatchSize::kUsual);
}

TEST(Auto, IsSaidAsOverrides) {
  const auto said = choose_settings(grpo(), {.actor = llama_8b()}, 4, gpu_of(180)).settings;
  ASSERT_EQ(said.size(), 3U);
  EXPECT_EQ(said[0], "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384");
  EXPECT_EQ(said[1], "actor_rollout_ref.actor.megatron.recompute_granularity=none");
  EXPECT_TRUE(said[2].starts_with("actor_rollout_ref.rollout.gpu_memory_utilization=0."))
      << said[2];
}

}  // namespace auto_settings_test
}  // namespace ferry::trainer
