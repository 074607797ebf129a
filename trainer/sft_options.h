// The configuration of supervised fine-tuning as the options of its parts.
#pragma once

#include <cstdint>
#include <memory>

#include "trainer/config/sft_config.h"
#include "trainer/data/examples.h"
#include "trainer/data/record_stream.h"
#include "trainer/megatron_engine.h"
#include "trainer/sft_examples.h"

namespace ferry::trainer {

StreamOptions train_stream_options(const SftConfig& config);
StreamOptions val_stream_options(const SftConfig& config);  // in the order of the files, to the end
ConversationKeys conversation_keys(const DataConfig& config);
SftEncoderOptions encoder_options(const DataConfig& config);
MegatronEngineOptions engine_options(const SftConfig& config,
                                     std::shared_ptr<const converter::Checkpoint> origin,
                                     std::int64_t total_steps);

// Steps of the run: those that were asked for, or as many whole batches as the epochs have. Throws
// Error(kUsage) if there is not one.
std::int64_t total_training_steps(const SftConfig& config, std::int64_t num_records);

}  // namespace ferry::trainer
