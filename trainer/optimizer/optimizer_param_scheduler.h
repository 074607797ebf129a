// Learning rate and weight decay over a run, by the formulas of Megatron-Core
// (optimizer_param_scheduler.py): a linear warm-up, then a decay of one of its styles. Steps are
// whatever step() counts: in Megatron's checkpoints, samples.
#pragma once

#include <cstdint>

#include "trainer/config/run_choices.h"

namespace ferry::trainer {

// The rates of the next step of an optimizer.
struct ParamGroup {
  double lr = 0;
  double weight_decay = 0;  // of parameters that decay: not biases, not vectors
};

struct OptimizerParamSchedulerConfig {
  double init_lr = 0;  // where the warm-up begins
  double max_lr = 1e-3;
  double min_lr = 0;
  std::int64_t lr_warmup_steps = 0;
  std::int64_t lr_decay_steps = 1;  // at its end the rate is min_lr
  LrDecayStyle lr_decay_style = LrDecayStyle::kConstant;
  std::int64_t wsd_decay_steps = 0;  // of WSD: the last ones, in which it decays
  WsdDecayStyle lr_wsd_decay_style = WsdDecayStyle::kLinear;
  double start_wd = 0.01;
  double end_wd = 0.01;
  std::int64_t wd_incr_steps = 0;
  WdIncrStyle wd_incr_style = WdIncrStyle::kConstant;

  bool operator==(const OptimizerParamSchedulerConfig&) const = default;
};

class OptimizerParamScheduler {
 public:
  // Throws Error(kUsage) for rates, decays or steps out of order.
  explicit OptimizerParamScheduler(OptimizerParamSchedulerConfig config);

  void step(std::int64_t increment) { num_steps_ += increment; }
  ParamGroup now() const { return {.lr = lr(), .weight_decay = weight_decay()}; }
  double lr() const;
  double weight_decay() const;

  const OptimizerParamSchedulerConfig& config() const { return config_; }
  std::int64_t num_steps() const { return num_steps_; }
  void load(std::int64_t num_steps) { num_steps_ = num_steps; }

 private:
  double wsd_coefficient() const;

  OptimizerParamSchedulerConfig config_;
  std::int64_t num_steps_ = 0;
};

}  // namespace ferry::trainer
