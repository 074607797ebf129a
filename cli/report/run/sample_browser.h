// Answers of a run to read: pick a step, order its answers by score, open one. Pure HTML and CSS:
// it works wherever the page is opened. Some steps of a long run, some answers of a step and the
// ends of a long text are shown; what is left out is said.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "trainer/metrics/sample_log.h"

namespace ferry::cli {

// The samples of one step.
struct ShownStep {
  std::int64_t step = 0;
  std::int64_t num_samples = 0;
  std::vector<double> scores{};  // of all of them, finite ones, ascending
  // The samples that are shown, best first, and the row of each in the file, from 0.
  std::vector<trainer::LoggedSample> samples{};
  std::vector<std::size_t> rows{};
  std::vector<nlohmann::json> exchanges{};  // of each, with tools or an environment, if known
};

struct SampleSet {
  std::filesystem::path folder{};
  std::int64_t num_steps = 0;
  std::int64_t num_unreadable = 0;  // lines of the files that were read
  std::vector<ShownStep> steps{};   // ascending
};

// Steps evenly over the run, with its first and last and `step`, if there is one; of each, answers
// of every score, the best and the worst among them. Empty if the folder has none. `sessions`: the
// folder of their journal, which may be missing.
SampleSet read_sample_set(const std::filesystem::path& folder,
                          std::optional<std::int64_t> step,
                          const std::filesystem::path& sessions = {});

// `name` is that of its section, and unique on the page. "" where there are no samples.
std::string sample_browser(const std::string& name, const SampleSet& set);

}  // namespace ferry::cli
