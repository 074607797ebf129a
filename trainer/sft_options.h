// A run's configuration as the options of the parts that it is made of.
#pragma once

#include <cstdint>

#include "models/gpt_model.h"
#include "models/world.h"
#include "trainer/config/sft_config.h"
#include "trainer/data/examples.h"
#include "trainer/data/record_stream.h"
#include "trainer/distributed_optimizer.h"
#include "trainer/optimizer_param_scheduler.h"
#include "trainer/sft_examples.h"
#include "trainer/training_checkpoint.h"

namespace ferry::trainer {

models::World::Options world_options(const SftConfig& config);
models::ModelOptions model_options(const EngineConfig& config);
OptimizerConfig optimizer_config(const SftConfig& config);
OptimizerParamSchedulerConfig scheduler_config(const OptimConfig& config, std::int64_t total_steps);
StreamOptions train_stream_options(const SftConfig& config);
StreamOptions val_stream_options(const SftConfig& config);  // in the order of the files, to the end
ConversationKeys conversation_keys(const DataConfig& config);
SftEncoderOptions encoder_options(const DataConfig& config);

// Steps of the run: those that were asked for, or as many whole batches as the epochs have. Throws
// Error(kUsage) if there is not one.
std::int64_t total_training_steps(const SftConfig& config, std::int64_t num_records);

}  // namespace ferry::trainer
