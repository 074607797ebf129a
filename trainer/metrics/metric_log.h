// Files of the metrics of a run: metrics.jsonl, a line a step as verl's "file" logger writes it,
// and TensorBoard's event files. Written by one rank; each step is on the disk's way when write()
// returns.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>

#include "trainer/metrics/metrics.h"

namespace ferry::trainer {

struct StepMetrics {
  std::int64_t step = 0;  // counted from 1; 0 is before training
  double time = 0;        // seconds since 1970
  Metrics values{};
};

class MetricLog {
 public:
  virtual ~MetricLog() = default;
  virtual void write(const StepMetrics& step) = 0;
};

// {"step": 1, "time": 1763734123.5, "data": {"train/loss": 2.1}}; what is not finite is null. A run
// that goes on at `first_step` drops the lines of that step and after.
std::unique_ptr<MetricLog> open_jsonl_log(const std::filesystem::path& path,
                                          std::int64_t first_step);

// A new file in the folder: docs/formats/events.md. A run that goes on says so in it: TensorBoard
// forgets what older files say of that step and after.
std::unique_ptr<MetricLog> open_event_log(const std::filesystem::path& folder,
                                          std::int64_t first_step);

// Now, in seconds since 1970, as the host's clock has it: of lines that say when.
double wall_time();

// Now, in seconds since 1970, by a clock that nobody sets: it began at the host's time when the
// process first asked. Differences are true, also where the host's clock was set between.
double steady_time();

}  // namespace ferry::trainer
