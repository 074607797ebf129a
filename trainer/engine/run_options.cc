#include "trainer/engine/run_options.h"

#include <algorithm>
#include <cmath>

#include "converter/convert.h"
#include "distckpt/base/error.h"

namespace ferry::trainer {
namespace {

double LoadBalancingConfig::*coeff_of(LoadBalancingType type) {
  switch (type) {
    case LoadBalancingType::kSeqAuxLoss:
      return &LoadBalancingConfig::seq_aux_loss_coeff;
    case LoadBalancingType::kGlobalAuxLoss:
      return &LoadBalancingConfig::global_aux_loss_coeff;
    default:
      return &LoadBalancingConfig::aux_loss_coeff;
  }
}

std::filesystem::path hf_folder(const std::filesystem::path& root) {
  return root / "hf_model";
}

// The last time at which a file of `folder` was written whose name ends so.
std::filesystem::file_time_type newest_write(const std::filesystem::path& folder,
                                             std::string_view ending = {}) {
  auto newest = std::filesystem::file_time_type::min();
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    if (entry.is_regular_file() && entry.path().native().ends_with(ending))
      newest = std::max(newest, entry.last_write_time());
  return newest;
}

}  // namespace

models::World::Options world_options(const TrainerConfig& config) {
  return {.device =
              config.device == DeviceKind::kCuda ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU),
          .timeout = std::chrono::seconds(config.nccl_timeout)};
}

models::ModelOptions model_options(const EngineConfig& config) {
  return {.alignment = config.alignment,
          .dtype = config.dtype,
          .sequence_parallel = config.uses_sequence_parallel(),
          .recompute = config.recompute(),
          .vision_tower = !config.freeze_vision_tower};
}

LoadBalancingConfig load_balancing_config(const EngineConfig& config) {
  LoadBalancingConfig balancing{.z_loss_coeff = config.moe_z_loss_coeff,
                                .bias_update_rate = config.moe_router_bias_update_rate};
  const auto& types = config.moe_router_load_balancing_type;
  for (std::size_t i = 0; i < types.size(); ++i) {
    if (types[i] != LoadBalancingType::kNone)
      balancing.*coeff_of(types[i]) = config.moe_aux_loss_coeff.at(i);
  }
  return balancing;
}

OptimizerConfig optimizer_config(const EngineConfig& engine, const OptimConfig& config) {
  OptimizerConfig optimizer{.adam_beta1 = config.adam_beta1,
                            .adam_beta2 = config.adam_beta2,
                            .adam_eps = config.adam_eps,
                            .decoupled_weight_decay = config.decoupled_weight_decay,
                            .clip_grad = config.clip_grad,
                            .exp_avg_dtype = config.exp_avg_dtype,
                            .exp_avg_sq_dtype = config.exp_avg_sq_dtype,
                            .offload = engine.optimizer_offload.value_or(false)};
  if (engine.dtype == distckpt::DType::kF16) optimizer.loss_scale.emplace();
  return optimizer;
}

OptimizerParamSchedulerConfig scheduler_config(const OptimConfig& config,
                                               std::int64_t total_steps) {
  const auto decay = config.lr_decay_steps.value_or(total_steps);
  const auto share = std::floor(config.lr_warmup_steps_ratio * static_cast<double>(decay));
  const auto warmup =
      config.lr_warmup_steps > 0 ? config.lr_warmup_steps : static_cast<std::int64_t>(share);
  return {.init_lr = config.lr_warmup_init,
          .max_lr = config.lr,
          .min_lr = config.min_lr,
          .lr_warmup_steps = warmup,
          .lr_decay_steps = std::max(decay, warmup + 1),
          .lr_decay_style = config.lr_decay_style,
          .wsd_decay_steps = config.lr_wsd_decay_steps.value_or(0),
          .lr_wsd_decay_style = config.lr_wsd_decay_style,
          .start_wd = config.start_weight_decay.value_or(config.weight_decay),
          .end_wd = config.end_weight_decay.value_or(config.weight_decay),
          .wd_incr_steps = total_steps,
          .wd_incr_style = config.weight_decay_incr_style};
}

std::shared_ptr<const converter::Checkpoint> open_checkpoint(const ModelConfig& config) {
  return std::make_shared<const converter::Checkpoint>(
      converter::open(config.path, {.hf_config = config.hf_config_path}));
}

std::filesystem::path tokenizer_folder(const ModelConfig& config,
                                       const converter::Checkpoint& origin) {
  if (!config.tokenizer_path.empty()) return config.tokenizer_path;
  if (!config.hf_config_path.empty()) return config.hf_config_path;
  return origin.hf ? origin.hf->folder : std::filesystem::path(config.path);
}

void save_hf(const std::filesystem::path& root, const std::filesystem::path& hf_config) {
  const auto target = hf_folder(root);
  try {
    converter::convert({.from = root,
                        .to = target,
                        .format = converter::Format::kHuggingFace,
                        .hf_config = hf_config,
                        .overwrite = true});
  } catch (Error& error) {
    error.add_context(fmt::format("saving {}", target.string()));
    if (error.kind() == ErrorKind::kIo)  // instead of an option of ferry convert
      error.set_hint("the checkpoint itself is whole: the same command goes on from it");
    throw;
  }
}

// A save begins when the files of the save before are written, and writes them when it is over.
bool has_newest_hf(const std::filesystem::path& root, const std::filesystem::path& hf_config) {
  try {
    const auto written = converter::open(hf_folder(root), {});
    const auto saved = converter::open(root, {.hf_config = hf_config});
    return newest_write(written.location.folder, ".safetensors") >
           newest_write(saved.location.folder);
  } catch (const Error&) {
    return false;
  } catch (const std::filesystem::filesystem_error&) {
    return false;
  }
}

}  // namespace ferry::trainer
