#include "trainer/sft_options.h"

#include <utility>

#include "distckpt/error.h"
#include "trainer/run_options.h"

namespace ferry::trainer {
namespace {

StreamOptions stream_options(const SftConfig& config, bool training) {
  return {.order = {.shuffle = training && config.data.shuffle,
                    .seed = static_cast<std::uint64_t>(config.trainer.seed),
                    .shuffle_buffer_bytes = config.data.shuffle_buffer_bytes},
          .on_malformed =
              config.data.malformed_rows == "fail" ? OnMalformed::kFail : OnMalformed::kSkip,
          .drop_last = training};
}

}  // namespace

StreamOptions train_stream_options(const SftConfig& config) {
  return stream_options(config, true);
}

StreamOptions val_stream_options(const SftConfig& config) {
  return stream_options(config, false);
}

ConversationKeys conversation_keys(const DataConfig& config) {
  return {.messages_key = config.messages_key,
          .prompt_key = config.prompt_key,
          .response_key = config.response_key,
          .tools_key = config.tools_key};
}

SftEncoderOptions encoder_options(const DataConfig& config) {
  return {.max_length = config.max_length,
          .truncation = config.truncation == "left"    ? Truncation::kLeft
                        : config.truncation == "right" ? Truncation::kRight
                                                       : Truncation::kError};
}

MegatronEngineOptions engine_options(const SftConfig& config,
                                     std::shared_ptr<const converter::Checkpoint> origin,
                                     std::int64_t total_steps) {
  return {.name = "actor",
          .origin = std::move(origin),
          .model = config.model,
          .engine = config.engine,
          .training = MegatronEngineOptions::Training{
              .optimizer = optimizer_config(config.engine, config.optim),
              .scheduler = scheduler_config(config.optim, total_steps),
              .checkpoint = {.root = config.trainer.default_local_dir,
                             .keep_last = config.checkpoint.keep_last.value_or(0),
                             .keep_every = config.checkpoint.keep_every.value_or(0)}}};
}

std::int64_t total_training_steps(const SftConfig& config, std::int64_t num_records) {
  if (config.trainer.total_training_steps) return *config.trainer.total_training_steps;
  const auto of_epoch = num_records / config.data.global_batch_size;
  require(of_epoch > 0, ErrorKind::kUsage,
          "data.train_files: {} records are less than one batch of {} (data.global_batch_size)",
          num_records, config.data.global_batch_size);
  return of_epoch * config.trainer.total_epochs;
}

}  // namespace ferry::trainer
