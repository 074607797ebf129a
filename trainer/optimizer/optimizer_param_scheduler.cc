#include "trainer/optimizer/optimizer_param_scheduler.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "distckpt/base/error.h"

namespace ferry::trainer {
namespace {

double ratio(std::int64_t part, std::int64_t whole) {
  return static_cast<double>(part) / static_cast<double>(whole);
}

// Falls from 1 at 0 to 0 at 1.
double cosine(double at) {
  return 0.5 * (std::cos(std::numbers::pi * at) + 1.0);
}

}  // namespace

OptimizerParamScheduler::OptimizerParamScheduler(OptimizerParamSchedulerConfig config)
    : config_(config) {
  const auto& c = config_;
  require(c.min_lr >= 0 && c.min_lr <= c.max_lr && c.init_lr <= c.max_lr, ErrorKind::kUsage,
          "min_lr {} and init_lr {} may not be above max_lr {}", c.min_lr, c.init_lr, c.max_lr);
  require(c.lr_warmup_steps >= 0 && c.lr_decay_steps > 0 && c.lr_warmup_steps < c.lr_decay_steps,
          ErrorKind::kUsage, "{} steps of warm-up and {} until the end of the decay",
          c.lr_warmup_steps, c.lr_decay_steps);
  require(c.lr_decay_style != LrDecayStyle::kWsd ||
              (c.wsd_decay_steps > 0 && c.wsd_decay_steps <= c.lr_decay_steps),
          ErrorKind::kUsage, "WSD decays in the last {} of {} steps", c.wsd_decay_steps,
          c.lr_decay_steps);
  require(c.start_wd >= 0 && c.end_wd >= c.start_wd, ErrorKind::kUsage,
          "weight decay from {} to {}", c.start_wd, c.end_wd);
  require(c.wd_incr_style != WdIncrStyle::kConstant || c.start_wd == c.end_wd, ErrorKind::kUsage,
          "a constant weight decay from {} to {}", c.start_wd, c.end_wd);
  require(c.wd_incr_style == WdIncrStyle::kConstant || c.wd_incr_steps > 0, ErrorKind::kUsage,
          "weight decay rises in {} steps", c.wd_incr_steps);
}

double OptimizerParamScheduler::lr() const {
  const auto& c = config_;
  if (c.lr_warmup_steps > 0 && num_steps_ <= c.lr_warmup_steps) {
    return c.init_lr + (c.max_lr - c.init_lr) * static_cast<double>(num_steps_) /
                           static_cast<double>(c.lr_warmup_steps);
  }
  if (c.lr_decay_style == LrDecayStyle::kConstant) return c.max_lr;
  if (num_steps_ > c.lr_decay_steps) return c.min_lr;
  if (c.lr_decay_style == LrDecayStyle::kInverseSquareRoot) {
    const auto root = [](std::int64_t steps) {
      return std::sqrt(static_cast<double>(std::max<std::int64_t>(steps, 1)));
    };
    return std::max(c.min_lr, c.max_lr * root(c.lr_warmup_steps) / root(num_steps_));
  }
  const auto at = ratio(num_steps_ - c.lr_warmup_steps, c.lr_decay_steps - c.lr_warmup_steps);
  const double coefficient = c.lr_decay_style == LrDecayStyle::kLinear   ? 1.0 - at
                             : c.lr_decay_style == LrDecayStyle::kCosine ? cosine(at)
                                                                         : wsd_coefficient();
  return c.min_lr + coefficient * (c.max_lr - c.min_lr);
}

double OptimizerParamScheduler::wsd_coefficient() const {
  const auto begin = config_.lr_decay_steps - config_.wsd_decay_steps;
  if (num_steps_ <= begin) return 1.0;
  const auto at = ratio(num_steps_ - begin, config_.wsd_decay_steps);
  if (config_.lr_wsd_decay_style == WsdDecayStyle::kLinear) return 1.0 - at;
  if (config_.lr_wsd_decay_style == WsdDecayStyle::kCosine) return cosine(at);
  if (config_.lr_wsd_decay_style == WsdDecayStyle::kExponential)
    return 2.0 * std::pow(0.5, at) - 1.0;
  return 1.0 - std::sqrt(at);
}

double OptimizerParamScheduler::weight_decay() const {
  const auto& c = config_;
  if (c.wd_incr_style == WdIncrStyle::kConstant || num_steps_ > c.wd_incr_steps) return c.end_wd;
  const auto at = ratio(num_steps_, c.wd_incr_steps);
  const double coefficient = c.wd_incr_style == WdIncrStyle::kLinear ? at : cosine(1 - at);
  return c.start_wd + coefficient * (c.end_wd - c.start_wd);
}

}  // namespace ferry::trainer
