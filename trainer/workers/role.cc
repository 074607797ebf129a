#include "trainer/workers/role.h"

#include <algorithm>
#include <filesystem>

#include "trainer/config/ppo_rules.h"
#include "trainer/engine/run_options.h"

namespace ferry::trainer {

bool has_role(const std::vector<int>& ranks, int rank) {
  return ranks.empty() || std::ranges::find(ranks, rank) != ranks.end();
}

int num_ranks(const std::vector<int>& ranks, int world_size) {
  return ranks.empty() ? world_size : static_cast<int>(ranks.size());
}

OffloadFlags offload_flags(const EngineConfig& config) {
  return {.param = config.param_offload, .grad = config.grad_offload};
}

MemorySettings memory_settings(const PpoConfig& config, const std::string& role) {
  MemorySettings memory{
      .longest = "data.max_response_length",
      .longest_sequence = config.longest_sequence(),
      .beside_longest = config.data.max_prompt_length,
      .batch_size = std::int64_t{config.data.train_batch_size} * config.rollout.n};
  const auto computing = [&](const std::string& prefix, const MicroBatchSize& size) {
    memory.learning = memory.computing = {.prefix = prefix, .size = size};
  };
  if (role == "actor") {
    memory.engine = kActorSection + ".megatron";
    computing(kRolloutSection + ".log_prob_",
              config.log_prob_micro_batches(config.rollout.log_prob));
    memory.learning = {.prefix = kActorSection + ".ppo_", .size = config.actor_micro_batches()};
    memory.batch_size = config.actor_mini_batches().size;
  } else if (role == "critic") {
    memory.engine = "critic.megatron";
    computing("critic.ppo_", config.critic_micro_batches());
    memory.batch_size = config.critic_mini_batches().size;
  } else if (role == "ref") {
    memory.engine = kRefSection + ".megatron";
    computing(kRefSection + ".log_prob_", config.log_prob_micro_batches(config.ref.log_prob));
  } else {
    memory.engine = "reward_model.megatron";
    computing("reward_model.", config.reward_micro_batches());
  }
  return memory;
}

MegatronEngineOptions role_engine(MegatronEngineOptions options,
                                  const PpoConfig& config,
                                  const OptimConfig& optim,
                                  std::int64_t total_steps) {
  options.memory = memory_settings(config, options.name);
  const std::filesystem::path run = config.trainer.run.default_local_dir;
  // Actor and critic save one after the other: what both have is never the newest of one alone.
  const auto keep_last = config.checkpoint.keep_last.value_or(0);
  options.training = MegatronEngineOptions::Training{
      .optimizer = optimizer_config(options.engine, optim),
      .scheduler = scheduler_config(optim, total_steps),
      .checkpoint = {
          .root = run / options.name,
          .keep_last = config.use_critic() && keep_last > 0 ? std::max(keep_last, 2) : keep_last,
          .keep_every = config.checkpoint.keep_every.value_or(0)}};
  return options;
}

}  // namespace ferry::trainer
