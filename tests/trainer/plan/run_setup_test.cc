// Roles of a run: which there are, what each does in a step, and the keys that its memory depends
// on.
#include "trainer/plan/run_setup.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/expect.h"
#include "tests/support/models/planned_runs.h"

namespace ferry::trainer {
namespace run_setup_test {

using support::fails;
using support::grpo;
using support::llama_8b;

const DeviceSpec kH200 = *find_device("H200");

RunSetup setup(const PpoConfig& config, int ranks = 4) {
  return setup_of(config, {.actor = llama_8b(), .critic = llama_8b(), .reward = llama_8b()}, ranks,
                  kH200);
}

std::vector<Role> roles_of(const PpoConfig& config) {
  std::vector<Role> roles;
  for (const auto& role : setup(config).roles) roles.push_back(role.role);
  return roles;
}

TEST(RunSetup, HasTheRolesThatTheConfigurationAsksFor) {
  auto config = grpo();
  config.actor.use_kl_loss = false;
  EXPECT_EQ(roles_of(config), (std::vector{Role::kActor}));
  config.actor.use_kl_loss = true;
  EXPECT_EQ(roles_of(config), (std::vector{Role::kActor, Role::kRef}));
  config.algorithm.adv_estimator = AdvantageEstimator::kGae;
  config.reward.enable = true;
  EXPECT_EQ(roles_of(config),
            (std::vector{Role::kActor, Role::kRef, Role::kCritic, Role::kReward}));
}

TEST(RunSetup, CountsUpdatesOfRolesThatTrain) {
  auto config = grpo();  // 64 x 8 answers, mini-batches of 16 x 8
  config.actor.use_kl_loss = true;
  config.actor.ppo_epochs = 3;
  const auto roles = setup(config).roles;
  EXPECT_TRUE(roles[0].trains);
  EXPECT_EQ(roles[0].updates, 12);
  EXPECT_EQ(roles[0].epochs, 3);
  EXPECT_FALSE(roles[1].trains);
  EXPECT_EQ(roles[1].updates, 0);
}

TEST(RunSetup, GivesARoleTheRanksThatItNames) {
  auto config = grpo();
  config.actor.ranks = {1, 2};
  config.rollout.ranks = {0, 3};
  const auto named = setup(config);
  EXPECT_EQ(named.roles.front().ranks, (std::vector{1, 2}));
  EXPECT_EQ(named.rollout->ranks, (std::vector{0, 3}));
  EXPECT_EQ(setup(grpo()).roles.front().ranks, (std::vector{0, 1, 2, 3}));
}

TEST(RunSetup, RefusesAMeshThatDoesNotFillItsRanks) {
  auto config = grpo();
  config.actor.megatron.parallel.tensor_model_parallel_size = 3;
  EXPECT_TRUE(fails(ErrorKind::kUsage,
                    {"actor_rollout_ref.actor.megatron: 4 ranks are no multiple of "
                     "tensor_model_parallel_size 3"},
                    [&] { setup(config); }));
}

// verl's and vLLM's layout: the ranks that share the experts are those of all its replicas.
TEST(RunSetup, GivesARolloutWholeExpertsOnAllOfItsRanks) {
  auto config = grpo();
  config.rollout.tensor_model_parallel_size = 2;
  config.rollout.expert_parallel_size = 4;
  const auto of_mixture = [&] {
    return setup_of(config, {.actor = support::qwen3_30b_a3b()}, 4, kH200);
  };
  EXPECT_TRUE(fails(ErrorKind::kUsage,
                    {"actor_rollout_ref.rollout: 4 ranks are no multiple of "
                     "expert_tensor_parallel_size 2 x expert_parallel_size 4",
                     "actor_rollout_ref.rollout.expert_tensor_parallel_size=1"},
                    of_mixture));
  config.rollout.expert_tensor_parallel_size = 1;
  const auto mesh = of_mixture().rollout->mesh();
  EXPECT_EQ(mesh.etp(), 1);
  EXPECT_EQ(mesh.ep(), 4);
  EXPECT_EQ(mesh.dp(), 2);
  EXPECT_TRUE(fails(ErrorKind::kUsage,
                    {"ep is 4, and the model has no experts", "planning actor_rollout_ref.rollout"},
                    [&] { setup(config); }));
}

TEST(RunSetup, SharesTheMemoryOfAnActorWhoseExpertsAreSplitAlike) {
  auto config = grpo();
  auto& parallel = config.actor.megatron.parallel;
  config.actor.megatron.sequence_parallel = false;
  parallel.tensor_model_parallel_size = config.rollout.tensor_model_parallel_size = 2;
  parallel.expert_model_parallel_size = config.rollout.expert_parallel_size = 2;
  EXPECT_TRUE(config.rollout_shares_memory());
  parallel.expert_tensor_parallel_size = 1;
  EXPECT_FALSE(config.rollout_shares_memory());
  config.rollout.expert_tensor_parallel_size = 1;
  EXPECT_TRUE(config.rollout_shares_memory());
}

// The keys of the run, not the options of a conversion.
TEST(RunSetup, NamesTheKeysThatCutAModelIntoStages) {
  auto config = grpo();
  auto& parallel = config.actor.megatron.parallel;
  parallel.pipeline_model_parallel_size = 3;
  const std::string section = "actor_rollout_ref.actor.megatron.";
  EXPECT_TRUE(
      fails(ErrorKind::kUsage,
            {"32 of 32 layers", "choose another " + section + "pipeline_model_parallel_size",
             section + "num_layers_in_first_pipeline_stage"},
            [&] { setup(config, 3); }));
  parallel.pipeline_model_parallel_layout = "Et|t|L";
  EXPECT_TRUE(fails(ErrorKind::kUsage,
                    {section + "pipeline_model_parallel_layout Et|t|L: has 2 layers"},
                    [&] { setup(config, 3); }));
}

TEST(RunSetup, RefusesMiniBatchesThatDataParallelRanksCannotShare) {
  auto config = grpo();
  config.algorithm.adv_estimator = AdvantageEstimator::kGae;
  config.rollout.n = 1;
  EXPECT_EQ(setup(config, 16).roles.front().updates, 4);
  config.critic.ppo_mini_batch_size = 8;
  EXPECT_TRUE(fails(ErrorKind::kUsage,
                    {"critic.ppo_mini_batch_size x actor_rollout_ref.rollout.n",
                     "8 sequences of an update are no multiple of the 16 data parallel ranks"},
                    [&] { setup(config, 16); }));
  config.actor.ppo_mini_batch_size = 8;
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"actor_rollout_ref.actor.ppo_mini_batch_size x"},
                    [&] { setup(config, 16); }));
  config.actor.megatron.parallel.tensor_model_parallel_size = 2;
  config.critic.megatron.parallel.tensor_model_parallel_size = 2;
  EXPECT_EQ(setup(config, 16).roles.front().updates, 8);
}

TEST(RunSetup, RefusesABatchThatDataParallelRanksCannotShare) {
  SftConfig config;
  config.data.train_batch_size = 6;
  EXPECT_EQ(setup_of(config, llama_8b(), 2, kH200).sequences, 6);
  EXPECT_TRUE(fails(ErrorKind::kUsage,
                    {"data.train_batch_size", "6 sequences", "the 4 data parallel ranks"},
                    [&] { setup_of(config, llama_8b(), 4, kH200); }));
}

TEST(RunSetup, RefusesAnUpdateThatDoesNotFillAnInterleavedPipeline) {
  SftConfig config;
  config.engine.parallel.pipeline_model_parallel_size = 4;
  config.engine.parallel.virtual_pipeline_model_parallel_size = 2;
  config.data.train_batch_size = 8;
  EXPECT_EQ(setup_of(config, llama_8b(), 8, kH200).sequences, 8);
  config.data.train_batch_size = 6;
  for (const int ranks : {4, 8}) {
    const auto sequences = fmt::format("{} sequences", 24 / ranks);
    EXPECT_TRUE(fails(ErrorKind::kUsage,
                      {"data.train_batch_size", sequences, "the 4 stages of an interleaved"},
                      [&] { setup_of(config, llama_8b(), ranks, kH200); }));
  }
  config.data.use_dynamic_bsz = false;
  config.data.micro_batch_size_per_gpu = 2;
  EXPECT_TRUE(fails(ErrorKind::kUsage,
                    {"6 sequences", "3 micro-batches of 2 (data.micro_batch_size_per_gpu)"},
                    [&] { setup_of(config, llama_8b(), 4, kH200); }));
  config.engine.parallel.virtual_pipeline_model_parallel_size = {};
  EXPECT_EQ(setup_of(config, llama_8b(), 4, kH200).sequences, 6);
}

TEST(RunSetup, RefusesMiniBatchesThatDoNotFillAnInterleavedPipeline) {
  auto config = grpo();  // mini-batches of 16 x 8
  config.actor.megatron.parallel.pipeline_model_parallel_size = 4;
  config.actor.megatron.parallel.virtual_pipeline_model_parallel_size = 2;
  EXPECT_NO_THROW(setup(config));
  config.actor.use_dynamic_bsz = false;
  config.actor.ppo_micro_batch_size_per_gpu = 64;
  EXPECT_TRUE(fails(ErrorKind::kUsage,
                    {"actor_rollout_ref.actor.ppo_mini_batch_size x actor_rollout_ref.rollout.n",
                     "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"},
                    [&] { setup(config); }));
}

TEST(MemorySettings, NameTheKeysOfTheirRole) {
  const auto config = grpo();
  const auto actor = memory_settings(config, Role::kActor);
  EXPECT_EQ(actor.engine, "actor_rollout_ref.actor.megatron");
  EXPECT_EQ(actor.learning.prefix, "actor_rollout_ref.actor.ppo_");
  EXPECT_EQ(actor.computing.prefix, "actor_rollout_ref.rollout.log_prob_");
  const auto ref = memory_settings(config, Role::kRef);
  EXPECT_EQ(ref.engine, "actor_rollout_ref.ref.megatron");
  EXPECT_EQ(ref.computing.prefix, "actor_rollout_ref.ref.log_prob_");
  const auto critic = memory_settings(config, Role::kCritic);
  EXPECT_EQ(critic.engine, "critic.megatron");
  EXPECT_EQ(critic.learning.prefix, "critic.ppo_");
  const auto reward = memory_settings(config, Role::kReward);
  EXPECT_EQ(reward.engine, "reward_model.megatron");
  EXPECT_EQ(reward.computing.prefix, "reward_model.");
}

TEST(MemorySettings, AreOfAMiniBatchWhereTheRoleLearns) {
  const auto config = grpo();
  EXPECT_EQ(memory_settings(config, Role::kActor).batch_size, 16 * 8);
  EXPECT_EQ(memory_settings(config, Role::kRef).batch_size, 64 * 8);
}

TEST(MemorySettings, TakeTheMomentsDtypesFromTheRolesOwnOptimizer) {
  auto config = grpo();
  config.critic.optim.exp_avg_dtype = distckpt::DType::kBF16;
  EXPECT_EQ(memory_settings(config, Role::kCritic).dtypes.exp_avg, distckpt::DType::kBF16);
  EXPECT_EQ(memory_settings(config, Role::kActor).dtypes.exp_avg, distckpt::DType::kF32);
}

}  // namespace run_setup_test
}  // namespace ferry::trainer
