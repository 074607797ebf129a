// The sections that all runs have as the options of the parts that they are made of.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>

#include "converter/open/checkpoint.h"
#include "models/distributed/world.h"
#include "models/gpt_model.h"
#include "trainer/config/run_sections.h"
#include "trainer/engine/pipeline/load_balancing.h"
#include "trainer/optimizer/distributed_optimizer.h"
#include "trainer/optimizer/optimizer_param_scheduler.h"

namespace ferry::trainer {

models::World::Options world_options(const TrainerConfig& config);
models::ModelOptions model_options(const EngineConfig& config);
LoadBalancingConfig load_balancing_config(const EngineConfig& config);
OptimizerConfig optimizer_config(const EngineConfig& engine, const OptimConfig& config);
OptimizerParamSchedulerConfig scheduler_config(const OptimConfig& config, std::int64_t total_steps);

// The first step that a run writes into its logs which goes on behind `step`, of which it forgets
// what is there. One that begins may validate first: that is step 0.
constexpr std::int64_t first_logged_step(std::int64_t step) {
  return step == 0 ? 0 : step + 1;
}

// The checkpoint that a role's weights come from.
std::shared_ptr<const converter::Checkpoint> open_checkpoint(const ModelConfig& config);

// The folder of tokenizer and chat template.
std::filesystem::path tokenizer_folder(const ModelConfig& config,
                                       const converter::Checkpoint& origin);

// The newest iteration of a run's model as Hugging Face files, in hf_model/ beside it; the one
// before is replaced. (A folder named "huggingface" would make a run of verl's of it.) By one rank.
void save_hf(const std::filesystem::path& root, const std::filesystem::path& hf_config);

// True if hf_model/ is whole and newer than the newest iteration, of which it is then.
bool has_newest_hf(const std::filesystem::path& root, const std::filesystem::path& hf_config);

}  // namespace ferry::trainer
