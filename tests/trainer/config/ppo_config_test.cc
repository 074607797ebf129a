#include "trainer/config/ppo_config.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/temp_dir.h"
#include "tests/trainer/config/ppo_overrides.h"

namespace ferry::trainer {
namespace ppo_config_test {

using ppo_overrides::kActor;
using ppo_overrides::kRef;
using ppo_overrides::kRollout;
using ppo_overrides::load;
using ppo_overrides::Overrides;
using support::fails;

TEST(PpoConfig, HasDefaultsOfEachAlgorithm) {
  const auto ppo = load({});
  EXPECT_EQ(ppo.algorithm.adv_estimator, AdvantageEstimator::kGae);
  EXPECT_EQ(ppo.rollout.n, 1);
  EXPECT_TRUE(ppo.use_critic());
  EXPECT_FALSE(ppo.use_reference_policy());
  EXPECT_EQ(ppo.actor.optim.lr, 1e-6);
  EXPECT_EQ(ppo.critic.optim.lr, 1e-5);
  const auto grpo = load({"actor_rollout_ref.actor.use_kl_loss=true"}, "grpo");
  EXPECT_EQ(grpo.algorithm.adv_estimator, AdvantageEstimator::kGrpo);
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

// Key by key: one that a role says leaves the others the actor's.
TEST(PpoConfig, GivesRolesTheKeysOfTheActorsEngineThatTheyLeaveOut) {
  const auto config =
      load({kActor + ".megatron.tensor_model_parallel_size=2", kActor + ".megatron.dtype=float32",
            kActor + ".megatron.alignment=bitwise", kActor + ".megatron.optimizer_offload=true",
            kRef + ".megatron.param_offload=true", "reward_model.megatron.dtype=bfloat16",
            "critic.megatron.tensor_model_parallel_size=1"});
  auto expected = config.actor.megatron;
  expected.optimizer_offload.reset();  // of a role that learns
  expected.freeze_vision_tower = true;
  expected.param_offload = true;
  EXPECT_EQ(config.ref.megatron, expected);
  expected.param_offload.reset();
  expected.dtype = distckpt::DType::kBF16;
  EXPECT_EQ(config.reward.megatron, expected);
  expected = config.actor.megatron;
  expected.parallel.tensor_model_parallel_size = 1;
  EXPECT_EQ(config.critic.megatron, expected);
}

// A role does not take what belongs to a decision of the actor's that is none of its own.
TEST(PpoConfig, GivesRolesNothingOfTheActorsThatMeansNothingThere) {
  const Overrides actor{kActor + ".megatron.pipeline_model_parallel_size=2",
                        kActor + ".megatron.pipeline_model_parallel_layout=Et|tL",
                        kActor + ".megatron.tensor_model_parallel_size=2",
                        kActor + ".megatron.sequence_parallel=true",
                        kActor + ".megatron.recompute_granularity=full",
                        kActor + ".megatron.recompute_method=block",
                        kActor + ".megatron.recompute_num_layers=1"};
  EXPECT_EQ(load(actor).critic.megatron, load(actor).actor.megatron);
  auto more = actor;
  for (const char* own : {"pipeline_model_parallel_size=1", "tensor_model_parallel_size=1",
                          "recompute_granularity=selective"})
    more.push_back(std::string("critic.megatron.") + own);
  EngineConfig expected;
  expected.recompute_granularity = models::Recompute::Granularity::kSelective;
  EXPECT_EQ(load(more).critic.megatron, expected);
  more = actor;
  more.emplace_back("critic.megatron.recompute_granularity=null");
  EXPECT_EQ(load(more).critic.megatron.recompute_method, std::nullopt);
  EXPECT_TRUE(fails(ErrorKind::kUsage,
                    {"reading critic.megatron.pipeline_model_parallel_layout = \"Et|tL\" (as " +
                     kActor + ".megatron.pipeline_model_parallel_layout, "},
                    [&] {
                      more.emplace_back("critic.megatron.num_layers_in_last_pipeline_stage=3");
                      load(more);
                    }));
}

TEST(PpoConfig, AggregatesLossesAsVerlWhereNothingIsSaid) {
  const auto ppo = load({"data.max_response_length=64"});
  const LossAggregation usual{.loss_agg_mode = LossAggMode::kTokenMean, .loss_scale_factor = 64};
  EXPECT_EQ(ppo.actor_loss_aggregation(), usual);
  EXPECT_EQ(ppo.critic_loss_aggregation(), usual);
  const auto gspo = kActor + ".policy_loss.loss_mode=gspo";
  EXPECT_EQ(load({gspo}).actor_loss_aggregation().loss_agg_mode, LossAggMode::kSeqMeanTokenMean);
  EXPECT_EQ(load({gspo}).critic_loss_aggregation().loss_agg_mode, LossAggMode::kSeqMeanTokenMean);
  EXPECT_EQ(
      load({gspo, kActor + ".loss_agg_mode=token-mean"}).actor_loss_aggregation().loss_agg_mode,
      LossAggMode::kTokenMean);
  const auto norm = load({"critic.loss_agg_mode=seq-mean-token-sum-norm"});
  EXPECT_EQ(norm.critic_loss_aggregation(),
            (LossAggregation{.loss_agg_mode = LossAggMode::kSeqMeanTokenSumNorm,
                             .loss_scale_factor = 512}));
  const auto scaled =
      load({kActor + ".loss_agg_mode=seq-mean-token-sum-norm", kActor + ".loss_scale_factor=10"});
  EXPECT_EQ(scaled.critic_loss_aggregation(), scaled.actor_loss_aggregation());
  EXPECT_EQ(scaled.critic_loss_aggregation().loss_scale_factor, 10);
}

TEST(PpoConfig, CutsUpdatesAsTheActorWhereTheCriticSaysNothing) {
  const auto config = load({kActor + ".ppo_mini_batch_size=64", kActor + ".shuffle=true",
                            kRollout + ".n=2", "critic.ppo_epochs=3"});
  EXPECT_EQ(config.actor_mini_batches(), (MiniBatches{.size = 128, .epochs = 1, .shuffle = true}));
  EXPECT_EQ(config.critic_mini_batches(), (MiniBatches{.size = 128, .epochs = 3, .shuffle = true}));
  EXPECT_FALSE(
      load({kActor + ".shuffle=true", "critic.shuffle=false"}).critic_mini_batches().shuffle);
}

TEST(PpoConfig, TakesOldLogProbsFromARolloutThatSaysTheSameBytes) {
  const std::string recompute = "actor_rollout_ref.actor.recompute_old_log_prob=";
  const std::string bitwise = "actor_rollout_ref.actor.megatron.alignment=bitwise";
  EXPECT_TRUE(load({bitwise}).takes_old_log_prob());
  EXPECT_TRUE(load({bitwise, recompute + "auto"}).takes_old_log_prob());
  EXPECT_TRUE(load({bitwise, recompute + "false"}).takes_old_log_prob());
  EXPECT_FALSE(load({bitwise, recompute + "true"}).takes_old_log_prob());
  EXPECT_FALSE(load({}).takes_old_log_prob());
  EXPECT_FALSE(load({recompute + "\"auto\""}).takes_old_log_prob());
  EXPECT_TRUE(load({bitwise, "actor_rollout_ref.rollout.top_k=5"}).takes_old_log_prob());
  const Overrides other{"actor_rollout_ref.actor.router_replay.mode=R2",
                        "algorithm.rollout_correction.bypass_mode=true"};
  for (const auto& more : other) EXPECT_FALSE(load({bitwise, more}).takes_old_log_prob()) << more;
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"auto or true or false is expected"},
                    [&] { (void)load({recompute + "never"}); }));
  const auto again = load({recompute + "true"});
  EXPECT_NE(to_toml(again).find("recompute_old_log_prob = true"), std::string::npos);
  EXPECT_NE(to_toml(load({})).find("recompute_old_log_prob = \"auto\""), std::string::npos);
}

const std::string kCorrection = "algorithm.rollout_correction.";

TEST(PpoConfig, ReadsCriteriaOfRejectionAsVerlWritesThem) {
  using Of = RejectionOption::Of;
  const auto correction = load({kCorrection + "rollout_rs=token_k1, seq_mean_k3,token_k1",
                                kCorrection + "rollout_rs_threshold=0.5_2.0, 0.04",
                                kCorrection + "rollout_is_threshold=0.5_5.0"})
                              .algorithm.rollout_correction;
  EXPECT_EQ(correction.rollout_is_threshold, (ThresholdBounds{.lower = 0.5, .upper = 5}));
  EXPECT_EQ(load({kCorrection + "rollout_is_threshold=2.5"})
                .algorithm.rollout_correction.rollout_is_threshold,
            ThresholdBounds{.upper = 2.5});
  const auto rules = correction.rejection_rules();
  ASSERT_EQ(rules.size(), 2U);  // a criterion that is named twice counts once
  EXPECT_EQ(rules[0].option, (RejectionOption{Of::kToken, 1}));
  EXPECT_EQ(rules[0].bounds, (ThresholdBounds{.lower = 0.5, .upper = 2}));
  EXPECT_EQ(rules[1].option, (RejectionOption{Of::kMean, 3}));
  EXPECT_EQ(rules[1].bounds, (ThresholdBounds{.upper = 0.04}));
  const auto listed = load({kCorrection + "rollout_rs=[\"token_k1\", \"seq_mean_k3\"]",
                            kCorrection + "rollout_rs_threshold=\"2.0\""})
                          .algorithm.rollout_correction.rejection_rules();
  ASSERT_EQ(listed.size(), 2U);
  EXPECT_EQ(listed[1].bounds, (ThresholdBounds{.upper = 2}));  // one for all
}

TEST(PpoConfig, RefusesCriteriaAndThresholdsOfRejectionThatMeanNothing) {
  EXPECT_TRUE(fails(ErrorKind::kUsage,
                    {"\"token_k9\", but must be one of token_k1, ", "did you mean token_k1?"},
                    [&] { (void)load({kCorrection + "rollout_rs=seq_max_k2, token_k9"}); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"did you mean seq_max_k2?"},
                    [&] { (void)load({kCorrection + "rollout_rs=seq_max_k1"}); }));
  for (const char* text : {"two", "5_0.5", "0", "-1", "1_2_3", "_2", "inf", "\"\""})
    EXPECT_TRUE(fails(ErrorKind::kUsage, {"rollout_is_threshold: ", "a positive number, or text"},
                      [&] { (void)load({kCorrection + "rollout_is_threshold=" + text}); }))
        << text;
}

TEST(PpoConfig, TakesAnyPositiveThresholdWithoutQuotes) {
  const auto bounds = [](const std::string& text) {
    return load({kCorrection + "rollout_is_threshold=" + text})
        .algorithm.rollout_correction.rollout_is_threshold;
  };
  EXPECT_EQ(bounds("10.0"), ThresholdBounds{.upper = 10});
  EXPECT_EQ(bounds("20"), ThresholdBounds{.upper = 20});
  EXPECT_EQ(bounds("0.5"), ThresholdBounds{.upper = 0.5});
  // TOML would take them for 0.52 and 25.
  EXPECT_EQ(bounds("0.5_2"), (ThresholdBounds{.lower = 0.5, .upper = 2}));
  EXPECT_EQ(bounds("2_5"), (ThresholdBounds{.lower = 2, .upper = 5}));
}

TEST(PpoConfig, TakesWhatVerlsScriptsWrite) {
  const auto config = load({"data.filter_overlong_prompts=True", "data.shuffle=False",
                            "actor_rollout_ref.actor.entropy_coeff=-0.01",
                            "actor_rollout_ref.actor.recompute_old_log_prob=True",
                            "data.apply_chat_template_kwargs.enable_thinking=False",
                            "algorithm.adv_estimator=grpo_vectorized", "data.truncation=middle",
                            "actor_rollout_ref.rollout.n=2"});
  EXPECT_TRUE(config.data.filter_overlong_prompts);
  EXPECT_FALSE(config.data.shuffle);
  EXPECT_EQ(config.actor.entropy_coeff, -0.01);
  EXPECT_EQ(config.actor.recompute_old_log_prob, true);
  EXPECT_EQ(config.data.apply_chat_template_kwargs.at("enable_thinking"), ConfigValue{false});
  EXPECT_EQ(config.algorithm.adv_estimator, AdvantageEstimator::kGrpo);
  EXPECT_EQ(config.data.truncation, Truncation::kMiddle);
}

TEST(PpoConfig, FindsPathsBelowTheFolderOfTheUser) {
  const std::string home = std::getenv("HOME");  // NOLINT(concurrency-mt-unsafe)
  const auto config = load({"data.train_files=[\"~/a.parquet\", \"b~/c\"]",
                            "actor_rollout_ref.model.path=~/model", "data.prompt_key=~/x"});
  EXPECT_EQ(config.data.train_files, (std::vector{home + "/a.parquet", std::string("b~/c")}));
  EXPECT_EQ(config.model.path, home + "/model");
  EXPECT_EQ(config.data.prompt_key, "~/x");
}

TEST(PpoConfig, PrintsTomlThatReadsBackToTheSame) {
  const support::TempDir dir;
  for (const char* algorithm : {"ppo", "grpo"}) {
    const auto config =
        load({"actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1",
              "actor_rollout_ref.actor.megatron.param_offload=true",
              "actor_rollout_ref.ref.megatron.context_parallel_size=2",
              "critic.megatron.expert_tensor_parallel_size=null",
              "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=4096", "critic.ppo_epochs=2",
              "reward_model.format_pattern=^<a>\\d+\"</a>$", "actor_rollout_ref.rollout.n=3",
              "algorithm.kl_ctrl.kl_coef=0.1", kCorrection + "rollout_rs=token_k1,seq_sum_k2",
              kCorrection + "rollout_rs_threshold=0.5_2.0,1e-05", "trainer.critic_warmup=0",
              "checkpoint.save_freq=10"},
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
      {"algorithm.adv_estimator=gdpo", "not implemented"},
      {"actor_rollout_ref.actor.policy_loss.loss_mode=dppo_tv", "not implemented"},
      {"actor_rollout_ref.actor.ppo_micro_batch_size=8", "actor.ppo_micro_batch_size_per_gpu"},
      {"actor_rollout_ref.rollout.multi_turn.enable=True",
       "actor_rollout_ref.rollout.agent.default_agent_loop: tool_agent"},
      {"actor_rollout_ref.rollout.mode=async", "answers always come one by one"},
      {"actor_rollout_ref.rollout.enable_rollout_routing_replay=True",
       "actor_rollout_ref.actor.router_replay.mode: R3"},
      {"actor_rollout_ref.rollout.agent.num_workers=8", "runs its own sessions"},
      {"critic.model.enable_gradient_checkpointing=True", "critic.megatron.recompute_granularity"},
      {"data.reward_fn_key=data_source", "the column is data_source"},
      {"trainer.log_val_generations=10", "trainer.log_samples"},
      {"+actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform",
       "actor_rollout_ref.actor.megatron.recompute_method: Megatron-Core's keys"},
      {"actor_rollout_ref.actor.megatron.override_transformer_config.moe_permute_fusion=True",
       "kernels are Ferry's own"},
      {"actor_rollout_ref.actor.megatron.router_replay.mode=R3",
       "actor_rollout_ref.actor.router_replay.mode"},
      {"actor_rollout_ref.rollout.pipeline_model_parallel_size=2", "a rollout has no stages"},
      {"reward.reward_model.enable=True", "reward_model.enable"},
      {"reward.reward_manager.name=dapo", "reward_model.command: a program scores"},
      {"reward.reward_kwargs.overlong_buffer_cfg.len=9", "reward_model.overlong_buffer.enable"},
      {"distillation.teacher_models.teacher_model.inference.temperature=1", "not implemented"},
      {"data.tokenizer=hf", "actor_rollout_ref.model.tokenizer_path"},
      {"model_engine=megatron", "as Megatron-Core does it"},
      {"actor_rollout_ref.actor.megatron.seed=1", "trainer.seed: of all random numbers"},
      {"critic.megatron.override_ddp_config.grad_reduce_in_fp32=true",
       "critic.megatron.grad_reduce_in_fp32: Megatron-Core's keys"},
  };
  const std::string_view without = "there is no such key";
  for (const auto* key :
       {"critic.enable", "actor_rollout_ref.model.use_shm", "data.validation_shuffle",
        "actor_rollout_ref.rollout.layered_summon", "trainer.esi_redundant_time"}) {
    EXPECT_TRUE(fails(ErrorKind::kUsage, {without}, [&] { load({key + std::string("=1")}); }));
    EXPECT_FALSE(fails(ErrorKind::kUsage, {"did you mean"}, [&] {
      load({key + std::string("=1")});
    })) << key;
  }
  for (const auto& one : near)
    EXPECT_TRUE(fails(ErrorKind::kUsage, {one.second}, [&] { load({one.first}); })) << one.first;
}

TEST(PpoConfig, CutsMicroBatchesAsTheActorWhereARoleSaysNothing) {
  const auto config =
      load({"actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048",
            "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=4096",
            "critic.use_dynamic_bsz=false", "critic.ppo_micro_batch_size_per_gpu=4"});
  EXPECT_EQ(config.log_prob_micro_batches(config.rollout.log_prob), config.actor_micro_batches());
  EXPECT_EQ(config.log_prob_micro_batches(config.ref.log_prob),
            (MicroBatchSize{.max_token_len_per_gpu = 4096}));
  EXPECT_EQ(config.critic_micro_batches(),
            (MicroBatchSize{.use_dynamic_bsz = false, .micro_batch_size_per_gpu = 4}));
  EXPECT_EQ(config.actor_micro_batches().max_token_len(2, config.longest_sequence()), 4096);
  EXPECT_EQ(config.reward_micro_batches().max_token_len(2, config.longest_sequence()), 32768);
}

// docs/training/configuration.md ends with the reference; where a field changes, paste what this
// prints.
TEST(PpoConfig, IsDocumentedFieldByField) {
  const char* root = std::getenv("FERRY_SOURCE_ROOT");
  ASSERT_NE(root, nullptr) << "FERRY_SOURCE_ROOT names the checkout";
  const auto text =
      distckpt::read_text(std::filesystem::path(root) / "docs/training/configuration.md");
  const auto reference = ppo_config_reference();
  EXPECT_NE(text.find(reference), std::string::npos) << reference;
}

}  // namespace ppo_config_test
}  // namespace ferry::trainer
