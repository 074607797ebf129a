#include "trainer/optimizer/grad_scaler.h"

#include <algorithm>

#include "distckpt/base/error.h"

namespace ferry::trainer {

DynamicGradScaler::DynamicGradScaler(GradScalerConfig config)
    : config_(config),
      state_{.scale = config.initial_loss_scale, .hysteresis_tracker = config.hysteresis} {
  require(config.min_loss_scale > 0 && config.initial_loss_scale >= config.min_loss_scale &&
              config.growth_factor > 1 && config.backoff_factor > 0 && config.backoff_factor < 1 &&
              config.loss_scale_window > 0 && config.hysteresis > 0,
          ErrorKind::kUsage, "a loss scale of {}, {} at least, cannot be adapted so",
          config.initial_loss_scale, config.min_loss_scale);
}

void DynamicGradScaler::update(bool found_inf) {
  if (found_inf) {
    state_.growth_tracker = 0;
    if (--state_.hysteresis_tracker <= 0)
      state_.scale = std::max(state_.scale * config_.backoff_factor, config_.min_loss_scale);
    return;
  }
  if (++state_.growth_tracker < config_.loss_scale_window) return;
  state_.growth_tracker = 0;
  state_.hysteresis_tracker = config_.hysteresis;
  state_.scale *= config_.growth_factor;
}

}  // namespace ferry::trainer
