#include "trainer/sft/sft_options.h"

#include <utility>

#include "trainer/engine/run_options.h"
#include "trainer/plan/run_setup.h"
#include "trainer/run/training_run.h"

namespace ferry::trainer {
ConversationKeys conversation_keys(const DataConfig& config) {
  return {.messages_key = config.messages_key,
          .prompt_key = config.prompt_key,
          .response_key = config.response_key,
          .tools_key = config.tools_key};
}

SftEncoderOptions encoder_options(const DataConfig& config) {
  return {.max_length = config.max_length, .truncation = config.truncation};
}

MegatronEngineOptions engine_options(const SftConfig& config,
                                     std::shared_ptr<const converter::Checkpoint> origin,
                                     std::int64_t total_steps) {
  return {.name = "actor",
          .origin = std::move(origin),
          .model = config.model,
          .engine = config.engine,
          .memory = memory_settings(config),
          .training = MegatronEngineOptions::Training{
              .optimizer = optimizer_config(config.engine, config.optim),
              .scheduler = scheduler_config(config.optim, total_steps),
              .checkpoint = {.root = config.trainer.default_local_dir,
                             .keep_last = config.checkpoint.keep_last.value_or(0),
                             .keep_every = config.checkpoint.keep_every.value_or(0)}}};
}

}  // namespace ferry::trainer
