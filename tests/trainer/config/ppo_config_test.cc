#include "trainer/config/ppo_config.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "distckpt/error.h"
#include "distckpt/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/temp_dir.h"

namespace ferry::trainer {
namespace {

using support::fails;
using Overrides = std::vector<std::string>;

const Overrides kLeast{"actor_rollout_ref.model.path=hf", "data.train_files=train.jsonl"};

PpoConfig load(Overrides more, std::string_view algorithm = "ppo") {
  more.insert(more.begin(), kLeast.begin(), kLeast.end());
  return load_ppo_config(algorithm, {}, more);
}

TEST(PpoConfig, HasDefaultsOfEachAlgorithm) {
  const auto ppo = load({});
  EXPECT_EQ(ppo.algorithm.adv_estimator, "gae");
  EXPECT_EQ(ppo.rollout.n, 1);
  EXPECT_TRUE(ppo.use_critic());
  EXPECT_FALSE(ppo.use_reference_policy());
  EXPECT_EQ(ppo.actor.optim.lr, 1e-6);
  EXPECT_EQ(ppo.critic.optim.lr, 1e-5);
  const auto grpo = load({"actor_rollout_ref.actor.use_kl_loss=true"}, "grpo");
  EXPECT_EQ(grpo.algorithm.adv_estimator, "grpo");
  EXPECT_EQ(grpo.rollout.n, 8);
  EXPECT_FALSE(grpo.use_critic());
  EXPECT_TRUE(grpo.use_reference_policy());
  EXPECT_EQ(load({"actor_rollout_ref.rollout.n=4"}, "grpo").rollout.n, 4);
}

TEST(PpoConfig, ReadsNestedSections) {
  const support::TempDir dir;
  distckpt::write_text(dir / "run.toml", R"(
[data]
train_files = "train.parquet"
max_prompt_length = 64
[actor_rollout_ref]
[actor_rollout_ref.model]
path = "hf"
[actor_rollout_ref.actor]
ranks = [0, 1]
[actor_rollout_ref.actor.megatron]
tensor_model_parallel_size = 2
[actor_rollout_ref.actor.optim]
lr = 3e-4
[actor_rollout_ref.rollout.val_kwargs]
n = 16
do_sample = true
temperature = 0.6
[critic]
optim.lr = 1e-3
)");
  const auto config = load_ppo_config("ppo", dir / "run.toml", {"critic.optim.lr=2e-3"});
  EXPECT_EQ(config.data.max_prompt_length, 64);
  EXPECT_EQ(config.actor.ranks, (std::vector<int>{0, 1}));
  EXPECT_EQ(config.actor.megatron.parallel.tensor_model_parallel_size, 2);
  EXPECT_EQ(config.actor.optim.lr, 3e-4);
  EXPECT_EQ(config.rollout.val_kwargs.n, 16);
  EXPECT_EQ(config.critic.optim.lr, 2e-3);
}

TEST(PpoConfig, GivesTheActorsMeshToRolesThatNameNone) {
  const auto config = load({"actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
                            "actor_rollout_ref.actor.megatron.dtype=float32",
                            "actor_rollout_ref.actor.megatron.optimizer_offload=true",
                            "reward_model.megatron.alignment=bitwise"});
  EXPECT_EQ(config.critic.megatron, config.actor.megatron);
  EXPECT_EQ(config.ref.megatron.parallel.tensor_model_parallel_size, 2);
  EXPECT_EQ(config.ref.megatron.dtype, "float32");
  EXPECT_FALSE(config.ref.megatron.optimizer_offload);
  EXPECT_EQ(config.reward.megatron, (EngineConfig{.alignment = "bitwise"}));
}

TEST(PpoConfig, PrintsTomlThatReadsBackToTheSame) {
  const support::TempDir dir;
  for (const char* algorithm : {"ppo", "grpo"}) {
    const auto config = load(
        {"actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1",
         "actor_rollout_ref.actor.megatron.param_offload=true",
         "actor_rollout_ref.ref.megatron.context_parallel_size=2",
         "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=4096", "critic.ppo_epochs=2",
         "reward_model.format_pattern=^<a>\\d+\"</a>$", "actor_rollout_ref.rollout.n=3",
         "algorithm.kl_ctrl.kl_coef=0.1", "trainer.critic_warmup=0", "checkpoint.save_freq=10"},
        algorithm);
    distckpt::write_text(dir / "printed.toml", to_toml(config));
    EXPECT_EQ(load_ppo_config("ppo", dir / "printed.toml", {}), config);
    EXPECT_NE(to_toml(config).find("\n[actor_rollout_ref.actor.megatron]\n"), std::string::npos);
  }
}

TEST(PpoConfig, SuggestsTheKeyThatAPeersNameIsNear) {
  const std::vector<std::pair<const char*, std::string_view>> near{
      {"trainer.save_freq=5", "checkpoint.save_freq?"},
      {"actor_rollout_ref.actor.clip_ratio_hi=5", "actor_rollout_ref.actor.clip_ratio_high?"},
      {"actor_rollout_ref.actor.lr=1", "actor_rollout_ref.actor.optim.lr?"},
      {"critic.lr=1", "critic.optim.lr?"},
      {"critic.tensor_model_parallel_size=2", "critic.megatron.tensor_model_parallel_size?"},
      {"rollout.n=2", "actor_rollout_ref.rollout.n?"},
      {"algorithm.adv_estimator=grp", "did you mean grpo?"},
      {"actor_rollout_ref.actor.kl_loss_type=low_var_k", "did you mean low_var_kl?"},
      {"algorithm.rollout_correction.rollout_is=tokens", "one of \"\", token, sequence"},
      {"actor_rollout_ref.rollout.top_p=0", "above 0 to 1"},
  };
  for (const auto& [text, hint] : near)
    EXPECT_TRUE(fails(ErrorKind::kUsage, {hint}, [&] { load({text}); })) << text;
}

}  // namespace
}  // namespace ferry::trainer
