// The configuration of supervised fine-tuning as the options of its parts.
#pragma once

#include <cstdint>
#include <memory>

#include "trainer/config/sft_config.h"
#include "trainer/data/examples.h"
#include "trainer/dataset/sft_examples.h"
#include "trainer/engine/megatron_engine.h"

namespace ferry::trainer {

ConversationKeys conversation_keys(const DataConfig& config);
SftEncoderOptions encoder_options(const DataConfig& config);
MegatronEngineOptions engine_options(const SftConfig& config,
                                     std::shared_ptr<const converter::Checkpoint> origin,
                                     std::int64_t total_steps);

}  // namespace ferry::trainer
