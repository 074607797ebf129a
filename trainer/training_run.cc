#include "trainer/training_run.h"

#include <algorithm>
#include <filesystem>

#include "distckpt/error.h"
#include "trainer/metrics/run_log.h"

namespace ferry::trainer {

Truncation truncation_of(std::string_view name) {
  return name == "left"    ? Truncation::kLeft
         : name == "right" ? Truncation::kRight
                           : Truncation::kError;
}

std::int64_t total_training_steps(const TrainerConfig& run,
                                  std::string_view batch_key,
                                  int batch_size,
                                  std::int64_t num_records) {
  if (run.total_training_steps) return *run.total_training_steps;
  const auto of_epoch = num_records / batch_size;
  require(of_epoch > 0, ErrorKind::kUsage,
          "data.train_files: {} records are less than one batch of {} ({})", num_records,
          batch_size, batch_key);
  return of_epoch * run.total_epochs;
}

bool logs_to(const TrainerConfig& run, std::string_view name) {
  return std::ranges::find(run.logger, name) != run.logger.end();
}

std::vector<std::unique_ptr<MetricLog>> open_logs(const TrainerConfig& run, std::int64_t first) {
  const std::filesystem::path folder = run.default_local_dir;
  std::vector<std::unique_ptr<MetricLog>> logs;
  if (logs_to(run, "file")) logs.push_back(open_jsonl_log(folder / kMetricsFile, first));
  if (logs_to(run, "tensorboard")) logs.push_back(open_event_log(folder / "tensorboard", first));
  return logs;
}

}  // namespace ferry::trainer
