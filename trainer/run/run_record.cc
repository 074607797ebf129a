#include "trainer/run/run_record.h"

#include <filesystem>
#include <utility>

#include "distckpt/storage/file_io.h"
#include "trainer/engine/run_options.h"
#include "trainer/metrics/run_log.h"

namespace ferry::trainer {
namespace {

// The files that metrics go to, from step `first` on.
std::vector<std::unique_ptr<MetricLog>> open_logs(const TrainerConfig& run, std::int64_t first) {
  const std::filesystem::path folder = run.default_local_dir;
  std::vector<std::unique_ptr<MetricLog>> logs;
  const bool is_read = run.logs_to(Logger::kWandb) || run.logs_to(Logger::kMlflow);
  if (run.logs_to(Logger::kFile) || is_read)
    logs.push_back(open_jsonl_log(folder / kMetricsFile, first));
  if (run.logs_to(Logger::kTensorboard))
    logs.push_back(open_event_log(folder / "tensorboard", first));
  return logs;
}

}  // namespace

RunRecord::RunRecord(const TrainerConfig& run,
                     int rank,
                     std::int64_t step,
                     std::int64_t total_steps,
                     const std::string& config,
                     std::function<void(const std::string&)> say)
    : shows_(rank == 0 && run.logs_to(Logger::kConsole)),
      say_(std::move(say)),
      progress_(total_steps),
      timeline_(std::filesystem::path(run.default_local_dir) / kTimelineFolder,
                rank,
                first_logged_step(step)) {
  if (rank != 0) return;
  distckpt::write_text(std::filesystem::path(run.default_local_dir) / kConfigFile, config);
  write_total_steps(run.default_local_dir, total_steps);
  logs_ = open_logs(run, first_logged_step(step));
  for (const auto& [logger, name] :
       {std::pair(Logger::kWandb, "wandb"), {Logger::kMlflow, "mlflow"}}) {
    if (run.logs_to(logger)) trackers_.push_back(std::make_unique<TrackingSink>(name, run, step));
  }
}

void RunRecord::finish() {
  for (const auto& tracker : trackers_) {
    if (const auto trouble = tracker->finish(); !trouble.empty()) say_("warning: " + trouble);
  }
  trackers_.clear();
}

void RunRecord::write(std::int64_t step, const Metrics& metrics) const {
  const StepMetrics line{.step = step, .time = wall_time(), .values = metrics};
  for (const auto& log : logs_) log->write(line);
}

void RunRecord::show(std::int64_t step, const Metrics& metrics) {
  if (shows_) say_(progress_.format({.step = step, .time = steady_time(), .values = metrics}));
}

}  // namespace ferry::trainer
