// The report of a training run: one HTML page of curves, samples, costs and the timeline of a step;
// and as JSON.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/report/run/sample_browser.h"
#include "trainer/metrics/run_log.h"

namespace ferry::cli {

struct RunReport {
  trainer::RunLog log{};
  std::vector<trainer::MetricSummary> summaries{};
  std::vector<trainer::Span> spans{};  // of one step
  std::vector<SampleSet> samples{};    // those that are there
};

std::string run_html(const RunReport& report);  // also well-formed XML
std::string run_text(const RunReport& report);
nlohmann::ordered_json run_json(const RunReport& report);

}  // namespace ferry::cli
