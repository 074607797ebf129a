// The record of a run, read back: its metrics, and the spans of a step.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "trainer/metrics/metric_log.h"
#include "trainer/metrics/timeline.h"

namespace ferry::trainer {

inline constexpr const char* kMetricsFile = "metrics.jsonl";
inline constexpr const char* kTimelineFolder = "timeline";
inline constexpr const char* kConfigFile =
    "config.toml";  // what the run was told, if it wrote that down
inline constexpr const char* kProgressFile = "progress.json";  // {"total_steps": 100}

struct MetricHistory {
  std::vector<StepMetrics>
      steps{};                      // ascending; lines of one step are put together, the later wins
  std::int64_t num_unreadable = 0;  // lines that are no metrics: a run that was killed leaves one
};

// Reads metrics.jsonl as open_jsonl_log() writes it, and as verl does (without "time", which is 0
// then). null is NaN. Throws Error(kNotFound | kIo).
MetricHistory read_metrics(const std::filesystem::path& path);

struct MetricSummary {
  std::string name{};
  std::int64_t num_finite = 0;
  std::int64_t num_not_finite = 0;
  std::int64_t first_not_finite = 0;  // its step
  // The finite values; 0 where there are none.
  double first = 0;
  double last = 0;
  double least = 0;
  double mean = 0;
  double most = 0;
};

// One summary for each metric, by name.
std::vector<MetricSummary> summarize(const MetricHistory& history);

// Reads one file of a timeline. Lines that are no spans are passed over.
std::vector<Span> read_spans(const std::filesystem::path& path,
                             std::optional<std::int64_t> step = {});

struct RunLog {
  std::filesystem::path metrics_path{};
  MetricHistory metrics{};
  std::string config{};                       // the text of kConfigFile; "" if there is none
  std::optional<std::int64_t> total_steps{};  // of kProgressFile, if it is there
  std::vector<std::filesystem::path> timeline_paths{};
};

// `run` is the folder of a run, or its file of metrics. Throws Error(kNotFound) where there is no
// such file, Error(kCorrupt) where it has lines, but no metrics.
RunLog read_run(const std::filesystem::path& run);

// Writes down how many steps the run is to have, those before it was resumed included.
void write_total_steps(const std::filesystem::path& run, std::int64_t total_steps);

// Reads the spans of all ranks in that step, or in the last one that all of them wrote.
std::vector<Span> read_step_spans(const RunLog& run, std::optional<std::int64_t> step);

}  // namespace ferry::trainer
