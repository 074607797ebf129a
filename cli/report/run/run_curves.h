// The charts of a run: of its metrics, those that belong together in one.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cli/report/chart.h"
#include "cli/report/run/run.h"

namespace ferry::cli {

// A chart of what belongs together: of these metrics, those that the run has.
struct Panel {
  ChartOptions options{};
  std::vector<std::pair<const char*, const char*>> metrics{};  // and what the legend calls them
};
const std::vector<Panel>& panels();  // what one looks at first, in this order

struct RunCurves {
  std::string main{};   // what one looks at first
  std::string other{};  // every other metric, but for times of parts
  std::string axis{};   // "minute": all charts also are over the wall clock; "": only over steps
};
RunCurves run_curves(const RunReport& report);
// One chart of each metric that a run has, with a curve of each run; by names of the runs.
RunCurves compared_curves(const std::vector<RunReport>& runs,
                          const std::vector<std::string>& names);

// Lets who opens the page choose the axis of its charts: the first goes before all of them, the
// second over them. "" where there is one axis.
std::string axis_switch(const RunCurves& curves);
std::string axis_labels(const RunCurves& curves);

// Over the steps, or the seconds since the first line of the history.
Series series_of(const trainer::MetricHistory& history,
                 std::string_view metric,
                 std::string name,
                 bool over_seconds = false);

// A summary with a finite value; null if there is none.
const trainer::MetricSummary* find_summary(const RunReport& report, std::string_view metric);

// "val-core/openai/gsm8k/acc/best@4/mean" taken apart.
struct ValidationName {
  std::string quantity{};   // "openai/gsm8k/acc"
  std::string statistic{};  // "best@4/mean"
  bool is_core = false;
};
std::optional<ValidationName> validation_name(std::string_view metric);

}  // namespace ferry::cli
