#include "trainer/plan/run_setup.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <string_view>

#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"
#include "models/spec/pipeline_stages.h"
#include "models/spec/sharding.h"
#include "trainer/config/ppo_rules.h"

namespace ferry::trainer {
namespace {

std::vector<int> ranks_of(const std::vector<int>& named, int world_size) {
  if (!named.empty()) return named;
  std::vector<int> all(static_cast<std::size_t>(world_size));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

// The options of `ferry convert` in a text, "--num-layers-in-first-pipeline-stage", as keys of a
// section.
std::string with_keys(std::string_view text, const std::string& section) {
  std::string result;
  while (!text.empty()) {
    const auto begin = text.find("--");
    result += text.substr(0, begin);
    if (begin == std::string_view::npos) break;
    text.remove_prefix(begin + 2);
    const auto size = std::min(text.find_first_not_of("abcdefghijklmnopqrstuvwxyz-"), text.size());
    std::string key(text.substr(0, size));
    std::ranges::replace(key, '-', '_');
    result += fmt::format("{}.{}", section, key == "pp" ? "pipeline_model_parallel_size" : key);
    text.remove_prefix(size);
  }
  return result;
}

// Throws Error(kUsage) in the words of a configuration unless the model can be split over a mesh
// whose sizes are keys of a section.
void check_mesh(const models::TransformerConfig& model,
                const models::MeshShape& mesh,
                const std::string& section) {
  try {
    models::check_fits(model, mesh);
  } catch (const Error& error) {
    Error said(error.kind(), with_keys(error.what(), section), with_keys(error.hint(), section));
    throw said.add_context("planning " + section);
  }
}

RolloutSetup checked(RolloutSetup rollout, const models::TransformerConfig& model) {
  (void)data_parallel_size(rollout.parallel, static_cast<int>(rollout.ranks.size()),
                           kRolloutSection, "expert_parallel_size");
  check_mesh(model, rollout.mesh(), kRolloutSection);
  return rollout;
}

// Throws unless an update can be cut into as many micro-batches as an interleaved pipeline has
// stages, or a multiple: packs by tokens may be of a sequence each.
void check_interleaved(const RoleSetup& role, const std::string& batch, std::int64_t dp) {
  const auto& parallel = role.engine.parallel;
  const auto& learning = role.memory.learning;
  const auto stages = models::pipeline_stages(parallel, static_cast<int>(role.model.num_layers),
                                              static_cast<int>(role.model.mtp_num_layers));
  if (stages.num_chunks == 1) return;
  const auto pp = parallel.pipeline_model_parallel_size;
  const auto mine = role.memory.batch_size / dp;
  if (learning.size.use_dynamic_bsz) {
    require(mine % pp == 0, ErrorKind::kUsage,
            "{}: {} sequences of an update on each data parallel rank are no multiple of the {} "
            "stages of an interleaved pipeline",
            batch, mine, pp);
    return;
  }
  const std::int64_t size = learning.size.micro_batch_size_per_gpu.value_or(1);
  const auto count = distckpt::ceil_div(mine, size);
  require(count % pp == 0, ErrorKind::kUsage,
          "{}: {} sequences of an update on each data parallel rank make {} micro-batches of {} "
          "({}micro_batch_size_per_gpu), no multiple of the {} stages of an interleaved pipeline",
          batch, mine, count, size, learning.prefix, pp);
}

// Checks a role that has all its fields. `batch`: the settings that an update's sequences are the
// product of, where the role trains.
RoleSetup checked(RoleSetup role, const std::string& batch) {
  const auto dp = data_parallel_size(role.engine.parallel, static_cast<int>(role.ranks.size()),
                                     role.memory.engine);
  check_mesh(role.model, role.mesh(), role.memory.engine);
  require(!role.trains || role.memory.batch_size % dp == 0, ErrorKind::kUsage,
          "{}: {} sequences of an update are no multiple of the {} data parallel ranks", batch,
          role.memory.batch_size, dp);
  if (role.trains) check_interleaved(role, batch, dp);
  return role;
}

models::TrainingDtypes dtypes_of(const EngineConfig& engine, const OptimConfig& optim) {
  return {.grad_reduce_in_fp32 = engine.grad_reduce_in_fp32,
          .exp_avg = optim.exp_avg_dtype,
          .exp_avg_sq = optim.exp_avg_sq_dtype};
}

}  // namespace

MemorySettings memory_settings(const SftConfig& config) {
  const auto size = config.micro_batches();
  return {.learning = {.size = size},
          .computing = {.size = size},
          .longest_sequence = config.data.max_length,
          .batch_size = config.data.train_batch_size,
          .dtypes = dtypes_of(config.engine, config.optim)};
}

MemorySettings memory_settings(const PpoConfig& config, Role role) {
  MemorySettings memory{
      .longest = "data.max_response_length",
      .longest_sequence = config.longest_sequence(),
      .beside_longest = config.data.max_prompt_length,
      .batch_size = std::int64_t{config.data.train_batch_size} * config.rollout.n};
  const auto computing = [&](const std::string& prefix, const MicroBatchSize& size) {
    memory.learning = memory.computing = {.prefix = prefix, .size = size};
  };
  switch (role) {
    case Role::kActor:
      memory.engine = kActorSection + ".megatron";
      computing(kRolloutSection + ".log_prob_",
                config.log_prob_micro_batches(config.rollout.log_prob));
      memory.learning = {.prefix = kActorSection + ".ppo_", .size = config.actor_micro_batches()};
      memory.batch_size = config.actor_mini_batches().size;
      memory.dtypes = dtypes_of(config.actor.megatron, config.actor.optim);
      break;
    case Role::kRef:
      memory.engine = kRefSection + ".megatron";
      computing(kRefSection + ".log_prob_", config.log_prob_micro_batches(config.ref.log_prob));
      break;
    case Role::kCritic:
      memory.engine = "critic.megatron";
      computing("critic.ppo_", config.critic_micro_batches());
      memory.batch_size = config.critic_mini_batches().size;
      memory.dtypes = dtypes_of(config.critic.megatron, config.critic.optim);
      break;
    case Role::kReward:
      memory.engine = "reward_model.megatron";
      computing("reward_model.", config.reward_micro_batches());
      break;
  }
  return memory;
}

RunSetup setup_of(const SftConfig& config,
                  const models::TransformerConfig& model,
                  int world_size,
                  const DeviceSpec& device) {
  return {.device = device,
          .world_size = world_size,
          .roles = {checked({.role = Role::kActor,
                             .model = model,
                             .engine = config.engine,
                             .ranks = ranks_of({}, world_size),
                             .memory = memory_settings(config),
                             .trains = true,
                             .updates = 1},
                            "data.train_batch_size")},
          .sequences = config.data.train_batch_size,
          .longest_sequence = config.data.max_length,
          .saves = config.checkpoint.save_freq.is_regular(),
          .async_save = config.checkpoint.async_save};
}

RunSetup setup_of(const PpoConfig& config,
                  const ModelsOfRun& models,
                  int world_size,
                  const DeviceSpec& device) {
  const auto sequences = std::int64_t{config.data.train_batch_size} * config.rollout.n;
  RunSetup setup{.device = device,
                 .world_size = world_size,
                 .sequences = sequences,
                 .prompt_tokens = config.data.max_prompt_length,
                 .longest_sequence = config.longest_sequence(),
                 .saves = config.checkpoint.save_freq.is_regular(),
                 .async_save = config.checkpoint.async_save};
  const auto add = [&](Role role, const models::TransformerConfig& model,
                       const EngineConfig& engine, const std::vector<int>& ranks,
                       const MiniBatches& learned, const std::string& batch = {}) {
    setup.roles.push_back(
        checked({.role = role,
                 .model = model,
                 .engine = engine,
                 .ranks = ranks_of(ranks, world_size),
                 .memory = memory_settings(config, role),
                 .trains = learned.size > 0,
                 .updates = learned.size > 0 ? sequences * learned.epochs / learned.size : 0,
                 .epochs = learned.epochs},
                batch));
  };
  add(Role::kActor, models.actor, config.actor.megatron, config.actor.ranks,
      config.actor_mini_batches(),
      fmt::format("{}.ppo_mini_batch_size x {}.n", kActorSection, kRolloutSection));
  if (config.use_reference_policy())
    add(Role::kRef, models.actor, config.ref.megatron, config.ref.ranks, {});
  if (config.use_critic())
    add(Role::kCritic, models.critic, config.critic.megatron, config.critic.ranks,
        config.critic_mini_batches(),
        fmt::format("{}.ppo_mini_batch_size x {}.n",
                    config.critic.ppo_mini_batch_size ? "critic" : kActorSection, kRolloutSection));
  if (config.reward.enable)
    add(Role::kReward, models.reward, config.reward.megatron, config.reward.ranks, {});
  setup.rollout =
      checked({.ranks = ranks_of(config.rollout.ranks, world_size),
               .parallel = config.rollout_parallel(),
               .settings = config.rollout,
               .shares_memory = config.rollout_shares_memory(),
               .computes_old_log_prob = !config.takes_old_log_prob() &&
                                        !config.algorithm.rollout_correction.bypass_mode},
              models.actor);
  return setup;
}

}  // namespace ferry::trainer
