// The metrics of a validation, under verl's names and with its numbers (verl
// trainer/ppo/metric_utils.py, process_validation_metrics; ray_trainer.py, _val_metrics_update): of
// each prompt with N answers: mean@N, std@N, and of k answers drawn from them, for k = 2, 4, ... N,
// the best, the worst, and that of the prediction most of them share. These are a bootstrap of 1000
// draws with seed 42 for each prompt, variable and k, the same draws as numpy's there, so that the
// numbers are verl's but for the rounding of their means.
#pragma once

#include <map>
#include <span>
#include <string>
#include <variant>

#include "trainer/metrics/metrics.h"

namespace ferry::trainer {

using ValidationValue = std::variant<double, std::string>;

// An answer, and what is known of it.
struct ValidationSample {
  std::string data_source = "unknown";
  std::string uid{};  // of its prompt
  // "reward", "acc": numbers are metrics. "pred", a text or a number, is what answers vote by:
  // where every answer to a prompt has it. What an answer lacks is left out.
  std::map<std::string, ValidationValue> values{};
};

// val-core/<data_source>/<variable>/{mean@N, best@N/mean, best@N/std, maj@N/mean, maj@N/std} of the
// largest N, and of "acc", or "reward" where the source has no "acc"; val-aux/... for all others.
// Each is the mean over the prompts of the source. A variable that is a text in any of a prompt's
// answers is no metric.
Metrics validation_metrics(std::span<const ValidationSample> samples);

}  // namespace ferry::trainer
