#include "trainer/config/ppo_rules.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "trainer/config/section_rules.h"

namespace ferry::trainer {
namespace {

// Estimators that compare the answers to a prompt with each other.
bool compares_answers(AdvantageEstimator estimator) {
  return estimator != AdvantageEstimator::kGae && estimator != AdvantageEstimator::kRemax &&
         estimator != AdvantageEstimator::kReinforcePlusPlus;
}

bool has_scale_factor(const LossAggregation& aggregation) {
  return aggregation.loss_agg_mode == LossAggMode::kSeqMeanTokenSumNorm;
}

ConfigRules<PpoConfig> batch_rules() {
  return {
      {"a_model_to_train",
       {"actor_rollout_ref.model.path"},
       [](const PpoConfig& c) { return !c.model.path.empty(); },
       "the model to train is not named"},
      {"prompts_to_train_on",
       {"data.train_files"},
       [](const PpoConfig& c) { return !c.data.train_files.empty(); },
       "no file of prompts is named"},
      {"mini_batches_make_a_batch",
       {"data.train_batch_size", kActorSection + ".ppo_mini_batch_size"},
       [](const PpoConfig& c) {
         return c.data.train_batch_size % c.actor.ppo_mini_batch_size == 0;
       },
       "the batch is no multiple of the mini-batch"},
      {"mini_batches_make_a_batch",
       {"data.train_batch_size", "critic.ppo_mini_batch_size"},
       [](const PpoConfig& c) {
         return c.data.train_batch_size % c.critic.ppo_mini_batch_size.value_or(1) == 0;
       },
       "the batch is no multiple of the critic's mini-batch"},
      {"advantages_need_groups",
       {"algorithm.adv_estimator", kRolloutSection + ".n"},
       [](const PpoConfig& c) {
         return c.rollout.n >= 2 || !compares_answers(c.algorithm.adv_estimator);
       },
       "this estimator compares answers to the same prompt, and there is one"},
      {"filtering_needs_groups",
       {"algorithm.filter_groups.enable", kRolloutSection + ".n"},
       [](const PpoConfig& c) { return c.rollout.n >= 2 || !c.algorithm.filter_groups.enable; },
       "the answers of a group of one are all worth the same"},
      {"groups_are_filtered_before_the_reference_is_asked",
       {"algorithm.filter_groups.enable", "algorithm.filter_groups.metric",
        "algorithm.use_kl_in_reward"},
       [](const PpoConfig& c) {
         return !c.algorithm.filter_groups.enable || !c.algorithm.use_kl_in_reward ||
                c.algorithm.filter_groups.metric != kSeqFinalReward;
       },
       "rewards with the distance from the reference in them are known behind the filter: "
       "seq_reward is without it"},
  };
}

// The factor of a role's loss, and the aggregation that it belongs to.
struct ScaleFactorView {
  bool is_set = false;
  LossAggregation aggregation{};
};

ConfigRules<ScaleFactorView> scale_factor_rules() {
  return {
      {"scale_factor_has_its_mode",
       {".loss_scale_factor", ".loss_agg_mode"},
       [](const ScaleFactorView& view) {
         return !view.is_set || has_scale_factor(view.aggregation);
       },
       "a scale factor is of loss_agg_mode seq-mean-token-sum-norm"},
  };
}

ConfigRules<PpoConfig> algorithm_rules() {
  return {
      {"covariances_have_a_range",
       {kActorSection + ".policy_loss.clip_cov_lb", kActorSection + ".policy_loss.clip_cov_ub"},
       [](const PpoConfig& c) {
         return c.actor.policy_loss.clip_cov_lb < c.actor.policy_loss.clip_cov_ub;
       },
       "no covariance lies between clip_cov_lb and clip_cov_ub"},
      {"adaptive_control_is_of_rewards",
       {"algorithm.kl_ctrl.type", "algorithm.use_kl_in_reward"},
       [](const PpoConfig& c) {
         return c.algorithm.kl_ctrl.type != KlCtrlType::kAdaptive || c.algorithm.use_kl_in_reward;
       },
       "there is no distance in rewards to control"},
      {"rejection_has_thresholds",
       {"algorithm.rollout_correction.rollout_rs",
        "algorithm.rollout_correction.rollout_rs_threshold"},
       [](const PpoConfig& c) {
         const auto& correction = c.algorithm.rollout_correction;
         const auto options = correction.rejection_options().size();
         const auto thresholds = correction.rollout_rs_threshold.size();
         return thresholds == options || (thresholds == 1 && options > 0);
       },
       "rollout_rs needs rollout_rs_threshold, one for all or as many, which means nothing without "
       "it"},
      {"k1_alone_is_bounded_below",
       {"algorithm.rollout_correction.rollout_rs",
        "algorithm.rollout_correction.rollout_rs_threshold"},
       [](const PpoConfig& c) {
         return std::ranges::all_of(c.algorithm.rollout_correction.rejection_rules(),
                                    [](const RejectionRule& rule) {
                                      return rule.option.k == 1 || !rule.bounds.lower.has_value();
                                    });
       },
       "k2 and k3 are never negative: they have an upper bound alone"},
      {"weights_to_normalize",
       {"algorithm.rollout_correction.rollout_is_batch_normalize",
        "algorithm.rollout_correction.rollout_is"},
       [](const PpoConfig& c) {
         const auto& correction = c.algorithm.rollout_correction;
         return !correction.rollout_is_batch_normalize || correction.rollout_is != RolloutIs::kNone;
       },
       "without rollout_is there are no weights"},
      {"reinforce_is_of_bypass_mode",
       {"algorithm.rollout_correction.loss_type", "algorithm.rollout_correction.bypass_mode",
        kActorSection + ".policy_loss.loss_mode"},
       [](const PpoConfig& c) {
         const auto& correction = c.algorithm.rollout_correction;
         return correction.loss_type == BypassLoss::kPpoClip ||
                (correction.bypass_mode && c.actor.policy_loss.loss_mode == LossMode::kVanilla);
       },
       "reinforce is a loss of bypass_mode, beside which no other loss_mode can be named"},
      {"replay_needs_what_was_recorded",
       {kActorSection + ".router_replay.mode", "algorithm.rollout_correction.bypass_mode"},
       [](const PpoConfig& c) {
         return c.actor.router_replay.mode != RouterReplayMode::kR2 ||
                !c.algorithm.rollout_correction.bypass_mode;
       },
       "in bypass_mode no old log-probabilities are computed, so R2 records nothing: "
       "R3 replays the rollout's routes"},
      {"old_log_prob_is_the_rollouts",
       {kActorSection + ".recompute_old_log_prob", kActorSection + ".megatron.alignment",
        kActorSection + ".router_replay.mode", "trainer.one_step_off",
        "async_training.staleness_threshold", "async_training.trigger_parameter_sync_step"},
       [](const PpoConfig& c) {
         return c.actor.recompute_old_log_prob.value_or(true) || c.rollout_says_old_log_prob() ||
                c.algorithm.rollout_correction.bypass_mode;
       },
       "the rollout's log-probabilities are other numbers than the actor's, unless the run is "
       "synchronous and bitwise, without R2; to learn from them nevertheless is "
       "algorithm.rollout_correction.bypass_mode"},
      {"bypass_recomputes_nothing",
       {kActorSection + ".recompute_old_log_prob", "algorithm.rollout_correction.bypass_mode"},
       [](const PpoConfig& c) {
         return !c.actor.recompute_old_log_prob.value_or(false) ||
                !c.algorithm.rollout_correction.bypass_mode;
       },
       "in bypass_mode the actor computes no old log-probabilities"},
      {"warmup_needs_a_critic",
       {"trainer.critic_warmup", "algorithm.adv_estimator"},
       [](const PpoConfig& c) { return c.trainer.critic_warmup <= 1 || c.use_critic(); },
       "there is no critic that could learn alone: nobody would, in the steps before"},
  };
}

ConfigRules<PpoConfig> record_rules() {
  return {
      {"validation_needs_records",
       {"data.val_files", "trainer.val_only"},
       [](const PpoConfig& c) { return !c.trainer.val_only || !c.data.val_files.empty(); },
       "there is nothing to validate on"},
      {"profiled_steps_have_ranks",
       {"global_profiler.steps", kActorSection + ".profiler.enable", "critic.profiler.enable"},
       [](const PpoConfig& c) {
         return c.global_profiler.steps.empty() || c.actor.profiler.enable ||
                (c.use_critic() && c.critic.profiler.enable);
       },
       "steps are profiled on no rank"},
      {"samples_that_are_written_have_a_folder",
       {"trainer.log_samples", "trainer.rollout_data_dir", "trainer.validation_data_dir"},
       [](const PpoConfig& c) {
         return c.trainer.log_samples ||
                (c.trainer.rollout_data_dir.empty() && c.trainer.validation_data_dir.empty());
       },
       "no samples are written, so that a folder for them has no effect"},
  };
}

ConfigRules<PpoConfig> frequency_rules() {
  return {
      {"epochs_end_within_steps",
       {"checkpoint.save_freq", "trainer.test_freq"},
       [](const PpoConfig& c) {
         return !c.checkpoint.save_freq.after_each_epoch &&
                !c.trainer.run.test_freq.after_each_epoch;
       },
       "after_each_epoch is of sft: a step of reinforcement learning may take more prompts than a "
       "batch, so that an epoch ends in the middle of one"},
  };
}

ConfigRules<PpoConfig> reward_rules() {
  return {
      {"a_reward_model_to_score",
       {"reward_model.enable", "reward_model.model.path"},
       [](const PpoConfig& c) { return !c.reward.enable || !c.reward.model.path.empty(); },
       "the model that scores is not named"},
      {"overlong_buffer_is_of_the_answer",
       {"reward_model.overlong_buffer.enable", "reward_model.overlong_buffer.len",
        "data.max_response_length"},
       [](const PpoConfig& c) {
         const auto& buffer = c.reward.overlong_buffer;
         return !buffer.enable || (buffer.len > 0 && buffer.len <= c.data.max_response_length);
       },
       "the buffer has from 1 to max_response_length tokens"},
  };
}

ConfigRules<PpoConfig> rollout_rules() {
  return {
      {"each_sequence_gets_a_token",
       {kRolloutSection + ".max_num_batched_tokens", kRolloutSection + ".max_num_seqs"},
       [](const PpoConfig& c) {
         return c.rollout.max_num_batched_tokens >= c.rollout.max_num_seqs;
       },
       "a forward pass has more sequences than tokens"},
      {"a_sequence_is_read_in_one_pass",
       {kRolloutSection + ".enable_chunked_prefill", kRolloutSection + ".max_num_batched_tokens",
        "data.max_prompt_length", "data.max_response_length"},
       [](const PpoConfig& c) {
         return c.rollout.enable_chunked_prefill ||
                c.rollout.max_num_batched_tokens >= c.longest_sequence();
       },
       "without enable_chunked_prefill the longest prompt and answer have to fit into "
       "max_num_batched_tokens"},
  };
}

ConfigRules<std::vector<int>> rank_rules() {
  return {{"ranks_ascend",
           {".ranks"},
           [](const std::vector<int>& ranks) {
             return std::ranges::adjacent_find(ranks, std::ranges::greater_equal{}) == ranks.end();
           },
           "ranks are named once each, in ascending order"}};
}

// `size` is what the names of both sizes begin with.
MicroBatchKeys micro_batch_keys(const std::string& use_dynamic_bsz,
                                const std::string& size,
                                const std::string& engine) {
  return {.use_dynamic_bsz = use_dynamic_bsz,
          .max_token_len_per_gpu = size + "max_token_len_per_gpu",
          .micro_batch_size_per_gpu = size + "micro_batch_size_per_gpu",
          .context_parallel_size = engine + ".context_parallel_size",
          .longest_sequence = {"data.max_prompt_length", "data.max_response_length"}};
}

MicroBatchView view_of(const PpoConfig& c,
                       const MicroBatchSize& size,
                       const EngineConfig& engine,
                       int mini_batch_size = 0) {
  return {.size = size,
          .context_parallel_size = engine.parallel.context_parallel_size,
          .longest_sequence = c.longest_sequence(),
          .batch_size = std::int64_t{mini_batch_size} * c.rollout.n};
}

}  // namespace

std::vector<MicroBatchesOfRole> micro_batches_of_roles() {
  auto of_actor = micro_batch_keys(kActorSection + ".use_dynamic_bsz", kActorSection + ".ppo_",
                                   kActorSection + ".megatron");
  of_actor.batch_size = {kActorSection + ".ppo_mini_batch_size", kRolloutSection + ".n"};
  auto of_critic = micro_batch_keys("critic.use_dynamic_bsz", "critic.ppo_", "critic.megatron");
  of_critic.batch_size = {"critic.ppo_mini_batch_size", kRolloutSection + ".n"};
  return {
      {of_actor,
       [](const PpoConfig& c) {
         return view_of(c, c.actor_micro_batches(), c.actor.megatron, c.actor.ppo_mini_batch_size);
       }},
      {of_critic,
       [](const PpoConfig& c) {
         return view_of(c, c.critic_micro_batches(), c.critic.megatron,
                        c.critic.ppo_mini_batch_size.value_or(c.actor.ppo_mini_batch_size));
       }},
      {micro_batch_keys(kRefSection + ".log_prob_use_dynamic_bsz", kRefSection + ".log_prob_",
                        kRefSection + ".megatron"),
       [](const PpoConfig& c) {
         return view_of(c, c.log_prob_micro_batches(c.ref.log_prob), c.ref.megatron);
       }},
      // These log-probabilities are the actor's, computed on its mesh.
      {micro_batch_keys(kRolloutSection + ".log_prob_use_dynamic_bsz",
                        kRolloutSection + ".log_prob_", kActorSection + ".megatron"),
       [](const PpoConfig& c) {
         return view_of(c, c.log_prob_micro_batches(c.rollout.log_prob), c.actor.megatron);
       }},
      {micro_batch_keys("reward_model.use_dynamic_bsz", "reward_model.", "reward_model.megatron"),
       [](const PpoConfig& c) { return view_of(c, c.reward_micro_batches(), c.reward.megatron); }},
  };
}

namespace {

// Adds the rules of actor or critic: `get` takes the role out of the whole.
template <typename Get>
void add_trained_rules(ConfigRules<PpoConfig>& rules, const std::string& role, Get get) {
  const auto engine = [get](const PpoConfig& c) -> const EngineConfig& { return get(c).megatron; };
  add_rules(rules, mesh_rules(), role + ".megatron", engine);
  add_rules(rules, recompute_rules(), role + ".megatron", engine);
  add_rules(rules, load_balancing_rules(), role + ".megatron", engine);
  add_rules(rules, optim_rules(), role + ".optim",
            [get](const PpoConfig& c) -> const OptimConfig& { return get(c).optim; });
  add_rules(rules, profiler_rules(), role + ".profiler", [get](const PpoConfig& c) {
    return ProfilerView{c.global_profiler, get(c).profiler};
  });
}

template <typename Get>
void add_forward_only_rules(ConfigRules<PpoConfig>& rules, const std::string& role, Get get) {
  add_rules(rules, mesh_rules(), role + ".megatron",
            [get](const PpoConfig& c) -> const EngineConfig& { return get(c).megatron; });
}

template <typename Get>
void add_rank_rules(ConfigRules<PpoConfig>& rules, const std::string& role, Get get) {
  add_rules(rules, rank_rules(), role,
            [get](const PpoConfig& c) -> const std::vector<int>& { return get(c).ranks; });
}

ConfigRules<PpoConfig> make_ppo_rules() {
  const auto actor = [](const PpoConfig& c) -> const ActorConfig& { return c.actor; };
  const auto ref = [](const PpoConfig& c) -> const RefConfig& { return c.ref; };
  const auto rollout = [](const PpoConfig& c) -> const RolloutConfig& { return c.rollout; };
  const auto critic = [](const PpoConfig& c) -> const CriticConfig& { return c.critic; };
  const auto reward = [](const PpoConfig& c) -> const RewardConfig& { return c.reward; };
  const auto itself = [](const PpoConfig& c) -> const PpoConfig& { return c; };
  ConfigRules<PpoConfig> rules;
  add_rules(rules, batch_rules(), "", itself);
  add_rank_rules(rules, kActorSection, actor);
  add_rank_rules(rules, kRefSection, ref);
  add_rank_rules(rules, kRolloutSection, rollout);
  add_rank_rules(rules, "critic", critic);
  add_rank_rules(rules, "reward_model", reward);
  add_trained_rules(rules, kActorSection, actor);
  add_trained_rules(rules, "critic", critic);
  add_forward_only_rules(rules, kRefSection, ref);
  add_forward_only_rules(rules, "reward_model", reward);
  for (const auto& role : micro_batches_of_roles())
    add_rules(rules, micro_batch_rules(role.keys), "", role.view);
  add_rules(rules, rollout_rules(), "", itself);
  add_rules(rules, async_rules(), "", itself);
  add_rules(rules, agent_rules(), kRolloutSection,
            [](const PpoConfig& c) -> const AgentSections& { return c.rollout.agents; });
  add_rules(rules, scale_factor_rules(), kActorSection, [](const PpoConfig& c) {
    return ScaleFactorView{c.actor.loss_scale_factor.has_value(), c.actor_loss_aggregation()};
  });
  add_rules(rules, scale_factor_rules(), "critic", [](const PpoConfig& c) {
    return ScaleFactorView{c.critic.loss_scale_factor.has_value(), c.critic_loss_aggregation()};
  });
  add_rules(rules, algorithm_rules(), "", itself);
  add_rules(rules, frequency_rules(), "", itself);
  add_rules(rules, reward_rules(), "", itself);
  add_rules(rules, record_rules(), "", itself);
  add_rules(rules, run_rules(), "", [](const PpoConfig& c) {
    return RunView{c.checkpoint, c.trainer.run, c.global_profiler, c.data.val_files,
                   c.checkpoint.save_freq.is_regular()};
  });
  return rules;
}

bool validates(const PpoConfig& c) {
  return !c.data.val_files.empty() && (c.trainer.run.test_freq.is_regular() ||
                                       c.trainer.run.val_before_train || c.trainer.val_only);
}

// Keys of parts that a run may lack. verl has them.
IneffectiveKeys<PpoConfig> keys_of_parts() {
  return {
      {{"critic"},
       [](const PpoConfig& c) { return c.use_critic(); },
       "algorithm.adv_estimator is not gae, so that there is no critic"},
      {{kRefSection},
       [](const PpoConfig& c) { return c.use_reference_policy(); },
       "neither use_kl_loss nor use_kl_in_reward asks for a reference"},
      {{kActorSection + ".kl_loss_coef", kActorSection + ".kl_loss_type"},
       [](const PpoConfig& c) { return c.actor.use_kl_loss; },
       "it is of use_kl_loss"},
      {{"algorithm.kl_ctrl", "algorithm.kl_penalty"},
       [](const PpoConfig& c) { return c.algorithm.use_kl_in_reward; },
       "it is of algorithm.use_kl_in_reward"},
      {{"algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl"},
       [](const PpoConfig& c) {
         return !c.algorithm.use_kl_in_reward || c.algorithm.kl_ctrl.type == KlCtrlType::kAdaptive;
       },
       "it is of algorithm.kl_ctrl.type adaptive"},
      {{"algorithm.filter_groups.metric", "algorithm.filter_groups.max_num_gen_batches"},
       [](const PpoConfig& c) { return c.algorithm.filter_groups.enable; },
       "it is of algorithm.filter_groups.enable"},
      {{"algorithm.rollout_correction.rollout_is_threshold"},
       [](const PpoConfig& c) {
         return c.algorithm.rollout_correction.rollout_is != RolloutIs::kNone;
       },
       "it is of algorithm.rollout_correction.rollout_is"},
      {{"reward_model.ranks", "reward_model.model", "reward_model.megatron",
        "reward_model.max_token_len_per_gpu", "reward_model.micro_batch_size_per_gpu"},
       [](const PpoConfig& c) { return c.reward.enable; },
       "reward_model.enable is false, so that no model scores"},
      {{"reward_model.num_workers"},
       [](const PpoConfig& c) { return !c.reward.command.empty(); },
       "it is of reward_model.command"},
      {{"reward_model.overlong_buffer.len", "reward_model.overlong_buffer.penalty_factor"},
       [](const PpoConfig& c) { return c.reward.overlong_buffer.enable; },
       "it is of reward_model.overlong_buffer.enable"},
      {{"data.val_files", "data.val_batch_size", kRolloutSection + ".val_kwargs"},
       validates,
       "the run does not validate: data.val_files, trainer.test_freq, trainer.val_before_train"},
      {{kRolloutSection + ".multi_turn"},
       [](const PpoConfig& c) { return c.rollout.agents.enabled(); },
       "every answer has one turn"},
  };
}

// Keys that verl does not have.
IneffectiveKeys<PpoConfig> own_keys() {
  return {
      {{"data.shuffle_buffer_bytes"},
       [](const PpoConfig& c) { return c.data.shuffle; },
       "without data.shuffle records come in their order"},
      {{kRolloutSection + ".gpu_memory_utilization"},
       [](const PpoConfig& c) { return c.trainer.run.device != DeviceKind::kCpu; },
       "on the host kv_cache_bytes is the size of the KV cache",
       /*is_error=*/true},
      {{"reward_model.command_timeout", "reward_model.command_start_timeout",
        "reward_model.command_max_restarts"},
       [](const PpoConfig& c) { return !c.reward.command.empty(); },
       "it is of reward_model.command"},
      {{"reward_model.format_score"},
       [](const PpoConfig& c) { return !c.reward.format_pattern.empty(); },
       "it is of reward_model.format_pattern"},
      {{"reward_model.format_pattern"},
       [](const PpoConfig& c) { return c.reward.format_score != 0; },
       "reward_model.format_score is 0"},
      {{kRolloutSection + ".agent.env_timeout"},
       [](const PpoConfig& c) { return c.rollout.agents.has(AgentLoopKind::kEnv); },
       "it is of env_command or env_url"},
      {{kRolloutSection + ".agent.program_timeout"},
       [](const PpoConfig& c) { return c.rollout.agents.has(AgentLoopKind::kProgram); },
       "it is of program_command"},
  };
}

IneffectiveKeys<PpoConfig> make_ineffective_in_ppo() {
  auto all = own_keys();
  for (auto& one : keys_of_parts()) all.push_back(std::move(one));
  for (auto& one : ineffective_in_algorithm()) all.push_back(std::move(one));
  add_ineffective(
      all, ineffective_in_optim(), kActorSection + ".optim",
      [](const PpoConfig& c) -> const auto& { return c.actor.optim; });
  add_ineffective(
      all, ineffective_in_optim(), "critic.optim",
      [](const PpoConfig& c) -> const auto& { return c.critic.optim; });
  add_ineffective(
      all, ineffective_in_profiler(), "global_profiler",
      [](const PpoConfig& c) -> const auto& { return c.global_profiler; });
  for (const auto& role : micro_batches_of_roles())
    add_ineffective(all, ineffective_sizes(role.keys), "", role.view);
  return all;
}

}  // namespace

const ConfigRules<PpoConfig>& ppo_rules() {
  static const auto rules = make_ppo_rules();
  return rules;
}

const IneffectiveKeys<PpoConfig>& ineffective_in_ppo() {
  static const auto all = make_ineffective_in_ppo();
  return all;
}

}  // namespace ferry::trainer
