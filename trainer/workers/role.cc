#include "trainer/workers/role.h"

#include <algorithm>
#include <filesystem>

#include "trainer/engine/run_options.h"
#include "trainer/plan/run_setup.h"

namespace ferry::trainer {

bool has_role(const std::vector<int>& ranks, int rank) {
  return ranks.empty() || std::ranges::find(ranks, rank) != ranks.end();
}

int num_ranks(const std::vector<int>& ranks, int world_size) {
  return ranks.empty() ? world_size : static_cast<int>(ranks.size());
}

OffloadFlags offload_flags(const EngineConfig& config) {
  return {.param = config.param_offload.value_or(false),
          .grad = config.grad_offload.value_or(false)};
}

MegatronEngineOptions role_engine(MegatronEngineOptions options,
                                  const PpoConfig& config,
                                  const OptimConfig& optim,
                                  std::int64_t total_steps) {
  options.memory = memory_settings(config, options.role);
  const std::filesystem::path run = config.trainer.run.default_local_dir;
  // Actor and critic save one after the other: what both have is never the newest of one alone.
  options.training = MegatronEngineOptions::Training{
      .optimizer = optimizer_config(options.engine, optim),
      .scheduler = scheduler_config(optim, total_steps),
      .checkpoint = {.root = run / name_of(options.role),
                     .keep_last = kept_of_roles(config.checkpoint.keep_last.value_or(0),
                                                config.use_critic() ? 2 : 1),
                     .keep_every = config.checkpoint.keep_every.value_or(0)}};
  return options;
}

}  // namespace ferry::trainer
