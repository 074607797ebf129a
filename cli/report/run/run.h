// The report of a training run: one HTML page of curves, samples, costs and the timeline of a step;
// and as JSON. Several runs have a page of their curves.
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
// The curves of several runs over each other, and their last values.
std::string compare_html(const std::vector<RunReport>& runs, const std::vector<std::string>& names);
std::string run_text(const RunReport& report);
nlohmann::ordered_json run_json(const RunReport& report);

}  // namespace ferry::cli
