#include "trainer/config/ppo_rules.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "distckpt/base/error.h"
#include "tests/support/expect.h"
#include "tests/trainer/config/ppo_overrides.h"

namespace ferry::trainer {
namespace ppo_rules_test {

using ppo_overrides::kActor;
using ppo_overrides::kRef;
using ppo_overrides::kRollout;
using ppo_overrides::load;
using ppo_overrides::Overrides;
using support::fails;

// Overrides that break a rule and none before it. `key` says where, for a rule of several sections.
struct Broken {
  std::string rule{};
  std::string key{};
  Overrides overrides{};

  friend std::ostream& operator<<(std::ostream& out, const Broken& one) {
    return out << one.rule << " of " << one.key;
  }
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
      {"rejection_has_thresholds",
       "algorithm.rollout_correction.rollout_rs_threshold",
       {"algorithm.rollout_correction.rollout_rs=token_k1, token_k2, seq_max_k3",
        "algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0, 0.1"}},
      {"k1_alone_is_bounded_below",
       "algorithm.rollout_correction.rollout_rs",
       {"algorithm.rollout_correction.rollout_rs=token_k1,token_k2",
        "algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0"}},
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
      {"thoughts_on_channels",
       kRollout + ".multi_turn.format",
       {kRollout + ".multi_turn.reasoning_parser=openai_gptoss"}},
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
      {"replicas_of_the_host_have_no_devices",
       "trainer.device",
       {kRollout + ".replicas.num=1", kRollout + ".replicas.devices=[1]", "trainer.device=cpu"}},
      {"profiled_steps_have_ranks",
       "global_profiler.steps",
       {"global_profiler.tool=torch", "global_profiler.steps=[1]"}},
      {"samples_that_are_written_have_a_folder",
       "trainer.rollout_data_dir",
       {"trainer.log_samples=false", "trainer.rollout_data_dir=a"}},
      {"devices_are_of_replicas",
       kRollout + ".replicas.devices",
       {kRollout + ".replicas.devices=[1]"}},
      {"retention_needs_checkpoints", "checkpoint.keep_last", {"checkpoint.keep_last=2"}},
      {"keep_every_adds_to_keep_last",
       "checkpoint.keep_every",
       {"checkpoint.save_freq=5", "checkpoint.keep_every=100"}},
      {"resume_path_has_a_path", "checkpoint.resume_mode", {"checkpoint.resume_mode=resume_path"}},
      {"epochs_end_within_steps",
       "checkpoint.save_freq",
       {"checkpoint.save_freq=after_each_epoch"}},
      {"validation_needs_records", "data.val_files", {"trainer.val_before_train=true"}},
      {"validation_needs_records", "trainer.val_only", {"trainer.val_only=true"}},
      {"discrete_profiles_do_not_continue",
       "global_profiler.discrete",
       {"global_profiler.discrete=true", "global_profiler.profile_continuous_steps=true"}},
  };
}

// The key that says how micro-batches of these sizes are packed.
std::string dynamic_key(const std::string& sizes) {
  if (sizes.ends_with(".ppo_")) return sizes.substr(0, sizes.size() - 4) + "use_dynamic_bsz";
  return sizes + "use_dynamic_bsz";
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
    add("profiled_ranks_have_steps", role, ".profiler.ranks", {".profiler.ranks=[0]"});
    add("one_way_to_name_ranks", role, ".profiler.ranks",
        {".profiler.enable=true", ".profiler.all_ranks=true", ".profiler.ranks=[0]"});
    all.back().overrides.push_back("global_profiler.tool=torch");
    all.back().overrides.push_back("global_profiler.steps=[1]");
    add("micro_batches_make_a_batch", role, ".ppo_micro_batch_size_per_gpu",
        {".use_dynamic_bsz=false", ".ppo_micro_batch_size_per_gpu=3"});
  }
  for (const auto& sizes : {kActor + ".ppo_", kRef + ".log_prob_", kRollout + ".log_prob_",
                            std::string("critic.ppo_"), std::string("reward_model.")}) {
    all.push_back({.rule = "one_size_of_micro_batches",
                   .key = sizes + "micro_batch_size_per_gpu",
                   .overrides = {dynamic_key(sizes) + "=false"}});
    add("a_sequence_fits_in_a_micro_batch", sizes, "max_token_len_per_gpu",
        {"max_token_len_per_gpu=1023"});
  }
  return all;
}

std::vector<Broken> all_broken() {
  auto all = broken_of_the_run();
  for (auto& one : broken_of_roles()) all.push_back(std::move(one));
  return all;
}

class BrokenRule : public testing::TestWithParam<Broken> {};

TEST_P(BrokenRule, IsRefusedByItsNameAndKeys) {
  const auto& broken = GetParam();
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"[" + broken.rule + "]", "reading " + broken.key + " "},
                    [&] { load(broken.overrides); }));
}

// "12_lr_decays_downwards": rules of several sections come several times.
INSTANTIATE_TEST_SUITE_P(PpoRules,
                         BrokenRule,
                         testing::ValuesIn(all_broken()),
                         [](const testing::TestParamInfo<Broken>& one) {
                           return std::to_string(one.index) + "_" + one.param.rule;
                         });

TEST(PpoRules, HaveEachACaseThatBreaksThem) {
  const auto all = all_broken();
  for (const auto& rule : ppo_rules()) {
    const bool is_broken = std::ranges::any_of(all, [&](const Broken& one) {
      return one.rule == rule.name && std::ranges::find(rule.keys, one.key) != rule.keys.end();
    });
    EXPECT_TRUE(is_broken) << rule.name << " of " << rule.keys.back();
  }
}

std::vector<std::string> notes_of(Overrides more, std::string_view algorithm) {
  more.insert(more.begin(), {"actor_rollout_ref.model.path=hf", "data.train_files=a.jsonl"});
  std::vector<std::string> notes;
  load_ppo_config(algorithm, {}, more, &notes);
  return notes;
}

// Each is said with what it lacks, and not with it.
TEST(PpoRules, NoteKeysOfTheirOwnWithoutEffect) {
  const std::vector<std::pair<Overrides, std::string>> cases{
      {{"reward_model.format_score=0.5"}, "reward_model.format_pattern=a"},
      {{"reward_model.command_timeout=5"}, "reward_model.command=score"},
      {{kRollout + ".agent.program_timeout=5"}, kRollout + ".agent.program_command=play"},
      {{kActor + ".optim.min_lr=1e-9"}, kActor + ".optim.lr_decay_style=linear"},
      {{"critic.optim.lr_warmup_init=1e-9"}, "critic.optim.lr_warmup_steps=2"},
  };
  for (auto [lacks, has] : cases) {
    const auto key = lacks.back().substr(0, lacks.back().find('='));
    const auto notes = notes_of(lacks, "ppo");
    ASSERT_EQ(notes.size(), 1) << key;
    EXPECT_TRUE(notes[0].starts_with("note       " + key + ": no effect: ")) << notes[0];
    lacks.push_back(has);
    EXPECT_TRUE(notes_of(lacks, "ppo").empty()) << key;
  }
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"gpu_memory_utilization: no effect: ", "[no_effect]"}, [] {
    load({"trainer.device=cpu", kRollout + ".gpu_memory_utilization=0.6"});
  }));
}

// Keys of verl's scripts beside what switches them off.
TEST(PpoRules, NoteWhatHasNoEffect) {
  EXPECT_EQ(notes_of({}, "grpo"), std::vector<std::string>{});
  EXPECT_EQ(notes_of({kActor + ".megatron.tensor_model_parallel_size=2"}, "grpo").size(), 0U);
  const Overrides set{"critic.optim.lr=1e-4",
                      kRef + ".log_prob_max_token_len_per_gpu=9000",
                      kActor + ".kl_loss_coef=0.1",
                      "algorithm.kl_ctrl.kl_coef=0.1",
                      "algorithm.filter_groups.metric=acc",
                      "algorithm.rollout_correction.rollout_is_threshold=3.0",
                      "reward_model.num_workers=8",
                      "reward_model.model.path=rm",
                      "reward_model.overlong_buffer.len=9",
                      "data.val_files=v.jsonl",
                      kRollout + ".multi_turn.max_user_turns=2"};
  const auto notes = notes_of(set, "grpo");
  ASSERT_EQ(notes.size(), set.size());
  for (const auto& one : set) {
    const auto key = one.substr(0, one.find('='));
    EXPECT_TRUE(std::ranges::any_of(notes, [&](const std::string& note) {
      return note.find(key + ": no effect: ") != note.npos;
    })) << key;
  }
  // DAPO's script.
  EXPECT_EQ(notes_of({"algorithm.use_kl_in_reward=false", "algorithm.kl_ctrl.kl_coef=0.0",
                      kActor + ".use_kl_loss=false", kActor + ".kl_loss_coef=0.0"},
                     "grpo")
                .size(),
            0U);
}

// Keys that the estimator, the loss or the draw does not read, beside one that does.
TEST(PpoRules, NoteKeysOfOtherAlgorithms) {
  const auto loss = kActor + ".policy_loss.";
  const auto mode = [&](const std::string& name) { return loss + "loss_mode=" + name; };
  const auto estimator = [](const std::string& name) { return "algorithm.adv_estimator=" + name; };
  const auto val = kRollout + ".val_kwargs.";
  const std::vector<std::pair<std::string, std::pair<std::string, std::string>>> cases{
      {"algorithm.lam=0.9", {estimator("reinforce_plus_plus"), estimator("gae")}},
      {"algorithm.gamma=0.9", {estimator("grpo"), estimator("reinforce_plus_plus")}},
      {"algorithm.norm_adv_by_std_in_grpo=False", {estimator("rloo"), estimator("grpo")}},
      {"algorithm.gigpo.step_advantage_w=2", {estimator("grpo"), estimator("gigpo")}},
      {kActor + ".clip_ratio=0.3", {mode("gpg"), mode("gspo")}},
      {kActor + ".clip_ratio_high=0.3", {mode("sapo"), mode("geo_mean")}},
      {kActor + ".clip_ratio_c=10", {mode("gspo"), mode("vanilla")}},
      {loss + "clip_cov_ratio=0.1", {mode("vanilla"), mode("clip_cov")}},
      {loss + "ppo_kl_coef=0.5", {mode("clip_cov"), mode("kl_cov")}},
      {kActor + ".tau_pos=2", {mode("vanilla"), mode("sapo")}},
      {kActor + ".data_loader_seed=1", {kActor + ".shuffle=false", kActor + ".shuffle=true"}},
      {"data.gen_batch_size=8",
       {"algorithm.filter_groups.enable=false", "algorithm.filter_groups.enable=true"}},
      {val + "top_p=0.9", {val + "temperature=0", val + "temperature=1.0"}},
      {val + "do_sample=true", {val + "temperature=0", val + "temperature=1.0"}},
  };
  const Overrides validates{"data.val_files=v", "trainer.test_freq=1"};
  for (const auto& [set, others] : cases) {
    auto lacks = validates, has = validates;
    lacks.insert(lacks.end(), {set, others.first});
    has.insert(has.end(), {set, others.second});
    const auto notes = notes_of(lacks, "grpo");
    ASSERT_EQ(notes.size(), 1U) << set;
    EXPECT_TRUE(notes[0].starts_with("note       " + set.substr(0, set.find('=')) + ": no effect"));
    EXPECT_TRUE(notes_of(has, "grpo").empty()) << set;
  }
  EXPECT_EQ(notes_of({kActor + ".clip_ratio=0.3", kActor + ".clip_ratio_low=0.2",
                      kActor + ".clip_ratio_high=0.28"},
                     "grpo")
                .size(),
            1U);
}

TEST(PpoRules, TakeWhatIsNoContradiction) {
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
  EXPECT_NO_THROW(load({"trainer.critic_warmup=1", "algorithm.adv_estimator=remax"}));
  EXPECT_NO_THROW(load({"reward_model.enable=true", "reward_model.model.path=rm",
                        "reward_model.command=python3 score.py"}));
}

}  // namespace ppo_rules_test
}  // namespace ferry::trainer
