// wandb and mlflow: a Python program that reads metrics.jsonl while the run goes on, and logs it
// there (tracking_sink.py). FERRY_PYTHON names the interpreter that has them; by default python3.
#pragma once

#include <string>

#include "trainer/config/run_sections.h"
#include "trainer/rewards/child_process.h"

namespace ferry::trainer {

class TrackingSink {
 public:
  // `which`: "wandb" or "mlflow". A run that goes on behind `step` > 0 goes on there, too. Throws
  // Error(kUsage) if they do not begin, for example as the interpreter lacks them, and Error(kIo)
  // if the interpreter cannot be started.
  TrackingSink(std::string which, const TrainerConfig& run, std::int64_t step);

  // Waits until all is logged, for two minutes at most. Returns what went wrong, else "".
  std::string finish();

 private:
  std::string which_;
  ChildProcess program_;
};

}  // namespace ferry::trainer
