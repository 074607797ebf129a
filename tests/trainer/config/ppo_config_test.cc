#include "trainer/config/ppo_config.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/temp_dir.h"
#include "trainer/config/ppo_rules.h"

namespace ferry::trainer {
namespace ppo_config_test {

using support::fails;
using Overrides = std::vector<std::string>;

const Overrides kLeast{"actor_rollout_ref.model.path=hf", "data.train_files=train.jsonl"};

PpoConfig load(Overrides more, std::string_view algorithm = "ppo") {
  more.insert(more.begin(), kLeast.begin(), kLeast.end());
  return load_ppo_config(algorithm, {}, more);
}

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

const std::string kActor = "actor_rollout_ref.actor";
const std::string kRef = "actor_rollout_ref.ref";
const std::string kRollout = "actor_rollout_ref.rollout";

// Key by key: one that a role says leaves the others the actor's.
TEST(PpoConfig, GivesRolesTheKeysOfTheActorsEngineThatTheyLeaveOut) {
  const auto config =
      load({kActor + ".megatron.tensor_model_parallel_size=2", kActor + ".megatron.dtype=float32",
            kActor + ".megatron.alignment=bitwise", kActor + ".megatron.optimizer_offload=true",
            kRef + ".megatron.param_offload=true", "reward_model.megatron.dtype=bfloat16",
            "critic.megatron.tensor_model_parallel_size=1"});
  auto expected = config.actor.megatron;
  expected.optimizer_offload = false;  // of a role that learns
  expected.param_offload = true;
  EXPECT_EQ(config.ref.megatron, expected);
  expected.param_offload = false;
  expected.dtype = distckpt::DType::kBF16;
  EXPECT_EQ(config.reward.megatron, expected);
  expected = config.actor.megatron;
  expected.parallel.tensor_model_parallel_size = 1;
  EXPECT_EQ(config.critic.megatron, expected);
}

// And not what belongs to a decision of the actor's that is none of the role's.
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
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"auto, true or false is expected"},
                    [&] { (void)load({recompute + "never"}); }));
  const auto again = load({recompute + "true"});
  EXPECT_NE(to_toml(again).find("recompute_old_log_prob = true"), std::string::npos);
  EXPECT_NE(to_toml(load({})).find("recompute_old_log_prob = \"auto\""), std::string::npos);
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

// Overrides that break a rule and none before it. `key` says where, for a rule of several sections.
struct Broken {
  std::string rule{};
  std::string key{};
  Overrides overrides{};
};

std::vector<Broken> broken_of_the_run() {
  return {
      {"a_model_to_train", "actor_rollout_ref.model.path", {"actor_rollout_ref.model.path="}},
      {"prompts_to_train_on", "data.train_files", {"data.train_files=[]"}},
      {"mini_batches_make_a_batch", kActor + ".ppo_mini_batch_size", {"data.train_batch_size=300"}},
      {"mini_batches_make_a_batch",
       "critic.ppo_mini_batch_size",
       {"critic.ppo_mini_batch_size=300"}},
      {"advantages_need_groups", kRollout + ".n", {"algorithm.adv_estimator=rloo"}},
      {"filtering_needs_groups", kRollout + ".n", {"algorithm.filter_groups.enable=true"}},
      {"groups_are_filtered_before_the_reference_is_asked",
       "algorithm.filter_groups.metric",
       {"algorithm.filter_groups.enable=true", kRollout + ".n=2",
        "algorithm.filter_groups.metric=seq_final_reward", "algorithm.use_kl_in_reward=true"}},
      {"scale_factor_has_its_mode",
       kActor + ".loss_scale_factor",
       {kActor + ".loss_scale_factor=10"}},
      {"scale_factor_has_its_mode", "critic.loss_scale_factor", {"critic.loss_scale_factor=10"}},
      {"covariances_have_a_range",
       kActor + ".policy_loss.clip_cov_ub",
       {kActor + ".policy_loss.clip_cov_ub=0.5"}},
      {"adaptive_control_is_of_rewards",
       "algorithm.kl_ctrl.type",
       {"algorithm.kl_ctrl.type=adaptive"}},
      {"rejection_has_thresholds",
       "algorithm.rollout_correction.rollout_rs",
       {"algorithm.rollout_correction.rollout_rs=token_k1"}},
      {"rejection_has_thresholds",
       "algorithm.rollout_correction.rollout_rs",
       {"algorithm.rollout_correction.rollout_rs_threshold=\"2.0\""}},
      {"weights_to_normalize",
       "algorithm.rollout_correction.rollout_is",
       {"algorithm.rollout_correction.rollout_is_batch_normalize=true"}},
      {"reinforce_is_of_bypass_mode",
       "algorithm.rollout_correction.bypass_mode",
       {"algorithm.rollout_correction.loss_type=reinforce"}},
      {"reinforce_is_of_bypass_mode",
       kActor + ".policy_loss.loss_mode",
       {"algorithm.rollout_correction.loss_type=reinforce",
        "algorithm.rollout_correction.bypass_mode=true", kActor + ".policy_loss.loss_mode=gspo"}},
      {"old_log_prob_is_the_rollouts",
       kActor + ".megatron.alignment",
       {kActor + ".recompute_old_log_prob=false"}},
      {"bypass_recomputes_nothing",
       kActor + ".recompute_old_log_prob",
       {kActor + ".recompute_old_log_prob=true", "algorithm.rollout_correction.bypass_mode=true"}},
      {"warmup_needs_a_critic",
       "trainer.critic_warmup",
       {"trainer.critic_warmup=2", "algorithm.adv_estimator=remax"}},
      {"replay_needs_what_was_recorded",
       kActor + ".router_replay.mode",
       {kActor + ".router_replay.mode=R2", "algorithm.rollout_correction.bypass_mode=true"}},
      {"a_reward_model_to_score", "reward_model.model.path", {"reward_model.enable=true"}},
      {"overlong_buffer_is_of_the_answer",
       "reward_model.overlong_buffer.len",
       {"reward_model.overlong_buffer.enable=true"}},
      {"overlong_buffer_is_of_the_answer",
       "reward_model.overlong_buffer.len",
       {"reward_model.overlong_buffer.enable=true", "reward_model.overlong_buffer.len=513"}},
      {"each_sequence_gets_a_token",
       kRollout + ".max_num_seqs",
       {kRollout + ".max_num_batched_tokens=255"}},
      {"a_sequence_is_read_in_one_pass",
       kRollout + ".enable_chunked_prefill",
       {kRollout + ".enable_chunked_prefill=false", kRollout + ".max_num_batched_tokens=1023"}},
      {"the_host_has_no_gpu_memory",
       kRollout + ".gpu_memory_utilization",
       {kRollout + ".gpu_memory_utilization=0.6", "trainer.device=cpu"}},
      {"a_draw_has_a_temperature",
       kRollout + ".val_kwargs.do_sample",
       {kRollout + ".val_kwargs.do_sample=true"}},
      {"async_training_needs_ranks_of_its_own",
       "trainer.one_step_off",
       {"trainer.one_step_off=true", kActor + ".ranks=[0, 1]"}},
      {"async_training_needs_ranks_of_its_own",
       "trainer.one_step_off",
       {"trainer.one_step_off=true", kActor + ".ranks=[0, 1]", kRollout + ".ranks=[1, 2]"}},
      {"async_training_needs_ranks_of_its_own",
       "critic.ranks",
       {"trainer.one_step_off=true", kActor + ".ranks=[0, 1]", kRollout + ".ranks=[2]"}},
      {"async_training_needs_ranks_of_its_own",
       "actor_rollout_ref.ref.ranks",
       {"trainer.one_step_off=true", kActor + ".ranks=[0, 1]", kRollout + ".ranks=[2]",
        "critic.ranks=[0]", kActor + ".use_kl_loss=true"}},
      {"async_training_needs_ranks_of_its_own",
       "reward_model.ranks",
       {"trainer.one_step_off=true", kActor + ".ranks=[0, 1]", kRollout + ".ranks=[2]",
        "critic.ranks=[0]", "reward_model.enable=true", "reward_model.model.path=rm",
        "reward_model.ranks=[1, 2]"}},
      {"tools_to_call",
       kRollout + ".multi_turn.tool_config_path",
       {kRollout + ".agent.default_agent_loop=tool_agent"}},
      {"an_environment_to_act_in",
       kRollout + ".agent.env_command",
       {kRollout + ".agent.default_agent_loop=env_agent"}},
      {"an_address_of_http",
       kRollout + ".agent.env_url",
       {kRollout + ".agent.env_url=\"ftp://127.0.0.1\""}},
      {"one_environment",
       kRollout + ".agent.env_url",
       {kRollout + ".agent.default_agent_loop=env_agent", kRollout + ".agent.env_command=\"true\"",
        kRollout + ".agent.env_url=\"http://127.0.0.1:1\""}},
      {"a_program_to_run",
       kRollout + ".agent.program_command",
       {kRollout + ".agent.default_agent_loop=program_agent"}},
      {"sessions_to_play_again",
       kRollout + ".agent.replay_dir",
       {kRollout + ".agent.replay_dir=sessions"}},
      {"agents_share_no_experts",
       kRollout + ".expert_parallel_size",
       {kRollout + ".agent.default_agent_loop=env_agent", kRollout + ".agent.env_command=\"true\"",
        kRollout + ".expert_parallel_size=2"}},
      {"async_training_is_led_by_rank_0",
       kRollout + ".ranks",
       {"trainer.one_step_off=true", kActor + ".ranks=[1]", "critic.ranks=[1]",
        kRollout + ".ranks=[0]"}},
      {"async_training_needs_ranks_of_its_own",
       "async_training.staleness_threshold",
       {"async_training.staleness_threshold=2", kActor + ".ranks=[0, 1]"}},
      {"one_step_off_is_a_threshold_of_1",
       "async_training.staleness_threshold",
       {kActor + ".ranks=[0]", "critic.ranks=[0]", kRollout + ".ranks=[1]",
        "trainer.one_step_off=true", "async_training.staleness_threshold=1"}},
      {"whole_batches_are_answered_ahead",
       "async_training.staleness_threshold",
       {kActor + ".ranks=[0]", "critic.ranks=[0]", kRollout + ".ranks=[1]",
        "async_training.staleness_threshold=0.5", "async_training.trigger_parameter_sync_step=3"}},
      {"more_prompts_are_asked_at_once",
       "algorithm.filter_groups.enable",
       {kActor + ".ranks=[0]", "critic.ranks=[0]", kRollout + ".ranks=[1]",
        "async_training.staleness_threshold=2", "algorithm.filter_groups.enable=true",
        kRollout + ".n=2"}},
      {"partial_answers_may_be_stale",
       "async_training.staleness_threshold",
       {kActor + ".ranks=[0]", "critic.ranks=[0]", kRollout + ".ranks=[1]",
        "async_training.staleness_threshold=1", "async_training.partial_rollout=true",
        "data.gen_batch_size=1536"}},
      {"more_prompts_than_a_step_takes",
       "data.gen_batch_size",
       {kActor + ".ranks=[0]", "critic.ranks=[0]", kRollout + ".ranks=[1]",
        "async_training.staleness_threshold=2", "async_training.partial_rollout=true",
        "data.gen_batch_size=2049"}},
      {"more_prompts_than_a_step_takes", "data.gen_batch_size", {"data.gen_batch_size=2048"}},
      {"partial_answers_share_no_experts",
       kRollout + ".expert_parallel_size",
       {kActor + ".ranks=[0]", "critic.ranks=[0]", kRollout + ".ranks=[1]",
        "async_training.staleness_threshold=2", "async_training.partial_rollout=true",
        "data.gen_batch_size=1536", kRollout + ".expert_parallel_size=2"}},
      {"replicas_have_whole_models",
       kRollout + ".tensor_model_parallel_size",
       {kRollout + ".replicas.num=1", kRollout + ".tensor_model_parallel_size=2",
        "trainer.device=cpu"}},
      {"replicas_compute_on_the_host", "trainer.device", {kRollout + ".replicas.elastic=true"}},
      {"replicas_answer_whole_batches",
       "async_training.partial_rollout",
       {kActor + ".ranks=[0]", "critic.ranks=[0]", kRollout + ".ranks=[1]",
        "async_training.staleness_threshold=2", "async_training.partial_rollout=true",
        "data.gen_batch_size=1536", kRollout + ".replicas.num=1", "trainer.device=cpu"}},
      {"retention_needs_checkpoints", "checkpoint.keep_last", {"checkpoint.keep_last=2"}},
      {"keep_every_adds_to_keep_last",
       "checkpoint.keep_every",
       {"checkpoint.save_freq=5", "checkpoint.keep_every=100"}},
      {"save_freq_is_a_number_of_steps", "checkpoint.save_freq", {"checkpoint.save_freq=0"}},
      {"resume_path_has_a_path", "checkpoint.resume_mode", {"checkpoint.resume_mode=resume_path"}},
      {"validation_needs_records", "data.val_files", {"trainer.val_before_train=true"}},
      {"trackers_read_the_file", "trainer.logger", {"trainer.logger=[\"console\", \"wandb\"]"}},
      {"discrete_profiles_do_not_continue",
       "global_profiler.discrete",
       {"global_profiler.discrete=true", "global_profiler.profile_continuous_steps=true"}},
  };
}

std::vector<Broken> broken_of_roles() {
  std::vector<Broken> all;
  const auto add = [&](const std::string& rule, const std::string& section, const std::string& key,
                       const Overrides& overrides) {
    all.push_back({.rule = rule, .key = section + key});
    for (const auto& text : overrides) all.back().overrides.push_back(section + text);
  };
  for (const auto& role :
       {kActor, kRef, kRollout, std::string("critic"), std::string("reward_model")})
    add("ranks_ascend", role, ".ranks", {".ranks=[0, 2, 2]"});
  for (const auto& role : {kActor, kRef, std::string("critic"), std::string("reward_model")}) {
    const auto mesh = role + ".megatron";
    add("virtual_stages_need_stages", mesh, ".virtual_pipeline_model_parallel_size",
        {".virtual_pipeline_model_parallel_size=2"});
    add("one_way_to_share_layers_out", mesh, ".pipeline_model_parallel_layout",
        {".pipeline_model_parallel_layout=Et|tL", ".num_layers_in_last_pipeline_stage=3"});
    add("sequence_parallel_needs_tensor_parallel", mesh, ".sequence_parallel",
        {".sequence_parallel=true"});
  }
  for (const auto& role : {kActor, std::string("critic")}) {
    add("full_recompute_is_whole_layers", role, ".megatron.recompute_method",
        {".megatron.recompute_method=block"});
    add("selective_recompute_has_modules", role, ".megatron.recompute_modules",
        {".megatron.recompute_modules=mlp"});
    add("each_balancing_loss_has_a_coefficient", role, ".megatron.moe_aux_loss_coeff",
        {".megatron.moe_aux_loss_coeff=0.1"});
    add("a_balancing_loss_is_named_once", role, ".megatron.moe_router_load_balancing_type",
        {".megatron.moe_router_load_balancing_type=[\"aux_loss\", \"aux_loss\"]",
         ".megatron.moe_aux_loss_coeff=[0.1, 0.2]"});
    const auto optim = role + ".optim";
    add("lr_decays_downwards", optim, ".min_lr", {".min_lr=1"});
    add("one_length_of_the_warmup", optim, ".lr_warmup_steps",
        {".lr_warmup_steps=2", ".lr_warmup_steps_ratio=0.1"});
    add("warmup_ends_before_decay", optim, ".lr_decay_steps",
        {".lr_warmup_steps=5", ".lr_decay_steps=5"});
    add("wsd_has_its_decay", optim, ".lr_decay_style", {".lr_decay_style=WSD"});
    add("weight_decay_changes_from_start_to_end", optim, ".start_weight_decay",
        {".start_weight_decay=0.1"});
    add("profiling_needs_a_tool", role, ".profiler.enable", {".profiler.enable=true"});
    add("one_way_to_name_ranks", role, ".profiler.ranks",
        {".profiler.all_ranks=true", ".profiler.ranks=[0]"});
    add("micro_batches_make_a_batch", role, ".ppo_micro_batch_size_per_gpu",
        {".use_dynamic_bsz=false", ".ppo_micro_batch_size_per_gpu=3"});
  }
  for (const auto& sizes : {kActor + ".ppo_", kRef + ".log_prob_", kRollout + ".log_prob_",
                            std::string("critic.ppo_"), std::string("reward_model.")}) {
    add("one_size_of_micro_batches", sizes, "micro_batch_size_per_gpu",
        {"micro_batch_size_per_gpu=2"});
    add("a_sequence_fits_in_a_micro_batch", sizes, "max_token_len_per_gpu",
        {"max_token_len_per_gpu=1023"});
  }
  return all;
}

TEST(PpoConfig, RefusesEachContradictionByItsNameAndKeys) {
  auto all = broken_of_the_run();
  for (auto& one : broken_of_roles()) all.push_back(std::move(one));
  for (const auto& [rule, key, overrides] : all) {
    EXPECT_TRUE(fails(ErrorKind::kUsage, {"[" + rule + "]", "reading " + key + " "},
                      [&] { load(overrides); }))
        << rule << " of " << key;
  }
  for (const auto& rule : ppo_rules()) {
    const bool is_broken = std::ranges::any_of(all, [&](const Broken& one) {
      return one.rule == rule.name && std::ranges::find(rule.keys, one.key) != rule.keys.end();
    });
    EXPECT_TRUE(is_broken) << rule.name << " of " << rule.keys.back();
  }
}

TEST(PpoConfig, TakesWhatIsNoContradiction) {
  EXPECT_NO_THROW(load({"trainer.one_step_off=true", kActor + ".ranks=[0, 1]", "critic.ranks=[0]",
                        kRollout + ".ranks=[2]"}));
  EXPECT_NO_THROW(load({"async_training.staleness_threshold=0.5",
                        "async_training.trigger_parameter_sync_step=4", kActor + ".ranks=[0]",
                        "critic.ranks=[0]", kRollout + ".ranks=[1]"}));
  EXPECT_NO_THROW(load({"async_training.staleness_threshold=2",
                        "async_training.partial_rollout=true", "data.gen_batch_size=1536",
                        kActor + ".ranks=[0]", "critic.ranks=[0]", kRollout + ".ranks=[1]"}));
  EXPECT_NO_THROW(load({kActor + ".use_kl_loss=true", "algorithm.use_kl_in_reward=true",
                        "algorithm.kl_ctrl.type=adaptive"}));
  EXPECT_NO_THROW(load({"reward_model.enable=true", "reward_model.model.path=rm",
                        "reward_model.command=python3 score.py"}));
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
