#include "trainer/run/run_record.h"

#include <filesystem>
#include <utility>

#include "distckpt/storage/file_io.h"
#include "trainer/engine/run_options.h"
#include "trainer/metrics/performance.h"
#include "trainer/metrics/run_log.h"
#include "trainer/run/training_run.h"

namespace ferry::trainer {

RunRecord::RunRecord(const TrainerConfig& run,
                     int rank,
                     std::int64_t step,
                     std::int64_t total_steps,
                     const std::string& config,
                     std::function<void(const std::string&)> say)
    : shows_(rank == 0 && logs_to(run, Logger::kConsole)),
      say_(std::move(say)),
      progress_(total_steps),
      timeline_(std::filesystem::path(run.default_local_dir) / kTimelineFolder,
                rank,
                first_logged_step(step)) {
  if (rank != 0) return;
  distckpt::write_text(std::filesystem::path(run.default_local_dir) / kConfigFile, config);
  logs_ = open_logs(run, first_logged_step(step));
}

void RunRecord::write(std::int64_t step, const Metrics& metrics) const {
  const StepMetrics line{.step = step, .time = wall_time(), .values = metrics};
  for (const auto& log : logs_) log->write(line);
}

void RunRecord::show(std::int64_t step, const Metrics& metrics) {
  if (shows_) say_(progress_.format({.step = step, .time = wall_time(), .values = metrics}));
}

}  // namespace ferry::trainer
