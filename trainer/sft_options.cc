#include "trainer/sft_options.h"

#include <algorithm>
#include <cmath>

#include "distckpt/error.h"

namespace ferry::trainer {
namespace {

models::Recompute recompute_of(const EngineConfig& config) {
  using Granularity = models::Recompute::Granularity;
  using Method = models::Recompute::Method;
  models::Recompute recompute;
  if (config.recompute_granularity == "full") {
    recompute.granularity = Granularity::kFull;
    recompute.method = config.recompute_method == "block" ? Method::kBlock : Method::kUniform;
    recompute.num_layers = config.recompute_num_layers.value_or(1);
  } else if (config.recompute_granularity == "selective") {
    const auto& names = config.recompute_modules;
    const auto has = [&](const char* name) {
      return std::ranges::find(names, name) != names.end();
    };
    recompute.granularity = Granularity::kSelective;
    recompute.modules = {
        .core_attn = names.empty() || has("core_attn"), .mlp = has("mlp"), .moe = has("moe")};
  }
  return recompute;
}

StreamOptions stream_options(const SftConfig& config, bool training) {
  return {.order = {.shuffle = training && config.data.shuffle,
                    .seed = static_cast<std::uint64_t>(config.trainer.seed),
                    .shuffle_buffer_bytes = config.data.shuffle_buffer_bytes},
          .on_malformed =
              config.data.malformed_rows == "fail" ? OnMalformed::kFail : OnMalformed::kSkip,
          .drop_last = training};
}

}  // namespace

models::World::Options world_options(const SftConfig& config) {
  return {.device =
              config.trainer.device == "cuda" ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU),
          .timeout = std::chrono::seconds(config.trainer.nccl_timeout)};
}

models::ModelOptions model_options(const EngineConfig& config) {
  return {.alignment = config.alignment == "bitwise" ? models::Alignment::kBitwise
                                                     : models::Alignment::kFast,
          .dtype = config.dtype == "float32"   ? distckpt::DType::kF32
                   : config.dtype == "float16" ? distckpt::DType::kF16
                                               : distckpt::DType::kBF16,
          .sequence_parallel = config.uses_sequence_parallel(),
          .recompute = recompute_of(config)};
}

OptimizerConfig optimizer_config(const SftConfig& config) {
  OptimizerConfig optimizer{.adam_beta1 = config.optim.adam_beta1,
                            .adam_beta2 = config.optim.adam_beta2,
                            .adam_eps = config.optim.adam_eps,
                            .decoupled_weight_decay = config.optim.decoupled_weight_decay,
                            .clip_grad = config.optim.clip_grad};
  if (config.engine.dtype == "float16") optimizer.loss_scale.emplace();
  return optimizer;
}

OptimizerParamSchedulerConfig scheduler_config(const OptimConfig& config,
                                               std::int64_t total_steps) {
  const auto warmup = config.lr_warmup_steps.value_or(static_cast<std::int64_t>(
      std::floor(config.lr_warmup_steps_ratio * static_cast<double>(total_steps))));
  return {.init_lr = config.lr_warmup_init,
          .max_lr = config.lr,
          .min_lr = config.min_lr,
          .lr_warmup_steps = warmup,
          .lr_decay_steps = std::max(config.lr_decay_steps.value_or(total_steps), warmup + 1),
          .lr_decay_style = config.lr_decay_style,
          .wsd_decay_steps = config.lr_wsd_decay_steps.value_or(0),
          .lr_wsd_decay_style = config.lr_wsd_decay_style,
          .start_wd = config.start_weight_decay.value_or(config.weight_decay),
          .end_wd = config.end_weight_decay.value_or(config.weight_decay),
          .wd_incr_steps = total_steps,
          .wd_incr_style = config.weight_decay_incr_style};
}

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

std::int64_t total_training_steps(const SftConfig& config, std::int64_t num_records) {
  if (config.trainer.total_training_steps) return *config.trainer.total_training_steps;
  const auto of_epoch = num_records / config.data.global_batch_size;
  require(of_epoch > 0, ErrorKind::kUsage,
          "data.train_files: {} records are less than one batch of {} (data.global_batch_size)",
          num_records, config.data.global_batch_size);
  return of_epoch * config.trainer.total_epochs;
}

}  // namespace ferry::trainer
