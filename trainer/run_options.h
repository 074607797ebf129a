// The sections that all runs have as the options of the parts that they are made of.
#pragma once

#include <cstdint>
#include <filesystem>

#include "converter/checkpoint.h"
#include "models/gpt_model.h"
#include "models/world.h"
#include "trainer/config/run_sections.h"
#include "trainer/distributed_optimizer.h"
#include "trainer/optimizer_param_scheduler.h"

namespace ferry::trainer {

models::World::Options world_options(const TrainerConfig& config);
models::ModelOptions model_options(const EngineConfig& config);
OptimizerConfig optimizer_config(const EngineConfig& engine, const OptimConfig& config);
OptimizerParamSchedulerConfig scheduler_config(const OptimConfig& config, std::int64_t total_steps);

// Where tokenizer and chat template are.
std::filesystem::path tokenizer_folder(const ModelConfig& config,
                                       const converter::Checkpoint& origin);

}  // namespace ferry::trainer
