// The factor by which the loss is scaled, so that gradients in fp16 neither vanish nor overflow
// (Megatron-Core optimizer/grad_scaler.py, DynamicGradScaler).
#pragma once

#include <cstdint>

namespace ferry::trainer {

struct GradScalerConfig {
  double initial_loss_scale = 4294967296.0;  // 2^32
  double min_loss_scale = 1.0;
  double growth_factor = 2.0;
  double backoff_factor = 0.5;
  int loss_scale_window = 1000;  // steps without overflow, after which it grows
  int hysteresis = 2;            // steps with overflow, after which it shrinks
};

// The state that a checkpoint keeps, beside the configuration.
struct GradScalerState {
  double scale = 1;
  int growth_tracker = 0;
  int hysteresis_tracker = 0;

  bool operator==(const GradScalerState&) const = default;
};

class DynamicGradScaler {
 public:
  explicit DynamicGradScaler(GradScalerConfig config);

  double scale() const { return state_.scale; }
  void update(bool found_inf);

  const GradScalerState& state() const { return state_; }
  void load(const GradScalerState& state) { state_ = state; }

 private:
  GradScalerConfig config_;
  GradScalerState state_;
};

}  // namespace ferry::trainer
