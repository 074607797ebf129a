// The configuration of reinforcement learning as the options of its parts.
#pragma once

#include <cstdint>

#include "trainer/algorithms/kl_penalty.h"
#include "trainer/config/ppo_config.h"
#include "trainer/data/record_stream.h"
#include "trainer/prompt_examples.h"

namespace ferry::trainer {

StreamOptions stream_options(const PpoConfig& config, bool training);
PromptEncoderOptions encoder_options(const PpoDataConfig& data);
KlControl kl_control(const KlCtrlConfig& config);

// Steps of the run: those that were asked for, or as many whole batches as the epochs have. Throws
// Error(kUsage) if there is not one.
std::int64_t total_training_steps(const PpoConfig& config, std::int64_t num_records);

}  // namespace ferry::trainer
