#include "trainer/config/rules/ppo_rules.h"

namespace ferry::trainer {
namespace {

constexpr bool kNote = true;

bool validates(const PpoConfig& c) {
  return !c.data.val_files.empty() &&
         (c.trainer.run.test_freq > 0 || c.trainer.run.val_before_train);
}

// Keys of parts that a run may lack. verl has them.
IneffectiveKeys<PpoConfig> keys_of_parts() {
  return {
      {{"critic"},
       [](const PpoConfig& c) { return c.use_critic(); },
       "algorithm.adv_estimator is not gae, so that there is no critic",
       kNote},
      {{kRefSection},
       [](const PpoConfig& c) { return c.use_reference_policy(); },
       "neither use_kl_loss nor use_kl_in_reward asks for a reference",
       kNote},
      {{kActorSection + ".kl_loss_coef", kActorSection + ".kl_loss_type"},
       [](const PpoConfig& c) { return c.actor.use_kl_loss; },
       "it is of use_kl_loss",
       kNote},
      {{"algorithm.kl_ctrl", "algorithm.kl_penalty"},
       [](const PpoConfig& c) { return c.algorithm.use_kl_in_reward; },
       "it is of algorithm.use_kl_in_reward",
       kNote},
      {{"algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl"},
       [](const PpoConfig& c) {
         return !c.algorithm.use_kl_in_reward || c.algorithm.kl_ctrl.type == KlCtrlType::kAdaptive;
       },
       "it is of algorithm.kl_ctrl.type adaptive",
       kNote},
      {{"algorithm.filter_groups.metric", "algorithm.filter_groups.max_num_gen_batches"},
       [](const PpoConfig& c) { return c.algorithm.filter_groups.enable; },
       "it is of algorithm.filter_groups.enable",
       kNote},
      {{"algorithm.rollout_correction.rollout_is_threshold"},
       [](const PpoConfig& c) {
         return c.algorithm.rollout_correction.rollout_is != RolloutIs::kNone;
       },
       "it is of algorithm.rollout_correction.rollout_is",
       kNote},
      {{"reward_model.ranks", "reward_model.model", "reward_model.megatron",
        "reward_model.max_token_len_per_gpu", "reward_model.micro_batch_size_per_gpu"},
       [](const PpoConfig& c) { return c.reward.enable; },
       "reward_model.enable is false, so that no model scores",
       kNote},
      {{"reward_model.num_workers"},
       [](const PpoConfig& c) { return !c.reward.command.empty(); },
       "it is of reward_model.command",
       kNote},
      {{"reward_model.overlong_buffer.len", "reward_model.overlong_buffer.penalty_factor"},
       [](const PpoConfig& c) { return c.reward.overlong_buffer.enable; },
       "it is of reward_model.overlong_buffer.enable",
       kNote},
      {{"data.val_files", "data.val_batch_size", kRolloutSection + ".val_kwargs"},
       validates,
       "the run does not validate: data.val_files, trainer.test_freq, trainer.val_before_train",
       kNote},
      {{kRolloutSection + ".multi_turn"},
       [](const PpoConfig& c) { return c.rollout.agents.enabled(); },
       "every answer has one turn",
       kNote},
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
       "on the host kv_cache_bytes is the size of the KV cache"},
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

const IneffectiveKeys<PpoConfig>& ineffective_in_ppo() {
  static const auto all = make_ineffective_in_ppo();
  return all;
}

}  // namespace ferry::trainer
