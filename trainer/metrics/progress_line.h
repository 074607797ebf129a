// The line that rank 0 says of each step: "step 12/100  loss 1.234  grad_norm 0.81  lr 1e-05 12,345
// tokens/s/GPU 3.2 s  9.8 GB  4 min left".
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "trainer/metrics/metric_log.h"

namespace ferry::trainer {

class ProgressLine {
 public:
  // total_steps: of the run, steps before it was resumed included.
  explicit ProgressLine(std::int64_t total_steps) : total_steps_(total_steps) {}

  // Without a newline. Metrics that a step lacks are left out. The time left is that of the steps
  // since the one before, on average over this program's.
  std::string format(const StepMetrics& step);

 private:
  std::int64_t total_steps_;
  std::optional<StepMetrics> first_{};  // of this program
};

}  // namespace ferry::trainer
