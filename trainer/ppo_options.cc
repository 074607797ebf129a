#include "trainer/ppo_options.h"

#include "distckpt/error.h"

namespace ferry::trainer {

StreamOptions stream_options(const PpoConfig& config, bool training) {
  return {.order = {.shuffle = training && config.data.shuffle,
                    .seed = static_cast<std::uint64_t>(config.trainer.run.seed),
                    .shuffle_buffer_bytes = config.data.shuffle_buffer_bytes},
          .on_malformed =
              config.data.malformed_rows == "fail" ? OnMalformed::kFail : OnMalformed::kSkip,
          .drop_last = training};
}

PromptEncoderOptions encoder_options(const PpoDataConfig& data) {
  return {.max_prompt_length = data.max_prompt_length,
          .filter_overlong_prompts = data.filter_overlong_prompts,
          .truncation = data.truncation == "left"    ? Truncation::kLeft
                        : data.truncation == "right" ? Truncation::kRight
                                                     : Truncation::kError};
}

std::int64_t total_training_steps(const PpoConfig& config, std::int64_t num_records) {
  if (config.trainer.run.total_training_steps) return *config.trainer.run.total_training_steps;
  const auto of_epoch = num_records / config.data.train_batch_size;
  require(of_epoch > 0, ErrorKind::kUsage,
          "data.train_files: {} records are less than one batch of {} (data.train_batch_size)",
          num_records, config.data.train_batch_size);
  return of_epoch * config.trainer.run.total_epochs;
}

KlControl kl_control(const KlCtrlConfig& config) {
  return {.adaptive = config.type == "adaptive",
          .kl_coef = config.kl_coef,
          .target_kl = config.target_kl,
          .horizon = config.horizon};
}

}  // namespace ferry::trainer
