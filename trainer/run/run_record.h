// The record that a run keeps in its folder: config.toml, the spans of each rank, and, by rank 0,
// metrics; with a line for people for each step.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "trainer/config/run_sections.h"
#include "trainer/metrics/metric_log.h"
#include "trainer/metrics/progress_line.h"
#include "trainer/metrics/timeline.h"
#include "trainer/run/tracking_sink.h"

namespace ferry::trainer {

class RunRecord {
 public:
  // `config`: its text; `step`: behind which the run begins, so that later entries of a record that
  // is there are forgotten; `say`: takes a line, without its newline.
  RunRecord(const TrainerConfig& run,
            int rank,
            std::int64_t step,
            std::int64_t total_steps,
            const std::string& config,
            std::function<void(const std::string&)> say);

  Timeline& timeline() { return timeline_; }
  // Waits for what reads the record while the run goes on. Says what they lack.
  void finish();
  void write(std::int64_t step, const Metrics& metrics) const;
  // Says the line of a step, where trainer.logger has the console.
  void show(std::int64_t step, const Metrics& metrics);

 private:
  bool shows_;
  std::function<void(const std::string&)> say_;
  ProgressLine progress_;
  Timeline timeline_;
  std::vector<std::unique_ptr<MetricLog>> logs_;         // of rank 0
  std::vector<std::unique_ptr<TrackingSink>> trackers_;  // likewise
};

}  // namespace ferry::trainer
