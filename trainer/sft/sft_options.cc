#include "trainer/sft/sft_options.h"

#include <utility>

#include "distckpt/base/integers.h"
#include "trainer/engine/run_options.h"
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
  auto size = config.data.micro_batches();
  if (size.use_dynamic_bsz && !size.max_token_len_per_gpu)
    size.max_token_len_per_gpu =
        distckpt::ceil_div(config.data.max_length, config.engine.parallel.context_parallel_size);
  return {.name = "actor",
          .origin = std::move(origin),
          .model = config.model,
          .engine = config.engine,
          .memory = MemorySettings{.learning = {.size = size},
                                   .computing = {.size = size},
                                   .longest_sequence = config.data.max_length,
                                   .batch_size = config.data.global_batch_size},
          .training = MegatronEngineOptions::Training{
              .optimizer = optimizer_config(config.engine, config.optim),
              .scheduler = scheduler_config(config.optim, total_steps),
              .checkpoint = {.root = config.trainer.default_local_dir,
                             .keep_last = config.checkpoint.keep_last.value_or(0),
                             .keep_every = config.checkpoint.keep_every.value_or(0)}}};
}

}  // namespace ferry::trainer
