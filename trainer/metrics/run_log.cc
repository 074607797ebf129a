#include "trainer/metrics/run_log.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <sstream>
#include <tuple>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/json.h"
#include "distckpt/storage/file_io.h"

namespace ferry::trainer {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// Calls with each line that is an object and holds the text; counts those that are none.
template <typename Visit>
std::int64_t for_each_line(const fs::path& path, const std::string& text, Visit&& visit) {
  [[maybe_unused]] const distckpt::ReadFile checked(path);  // names a file that is missing, or none
  std::ifstream file(path);
  std::int64_t num_unreadable = 0;
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line.find(text) == std::string::npos) continue;
    const auto parsed = distckpt::json_or_discarded(line);
    if (!parsed.is_object() || !visit(parsed)) ++num_unreadable;
  }
  require(file.eof(), ErrorKind::kIo, "{}: cannot be read", path.string());
  return num_unreadable;
}

std::optional<double> number_at(const json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_number() ? std::optional(found->get<double>())
                                                     : std::nullopt;
}

std::int64_t integer_at(const json& object, const char* key, std::int64_t otherwise) {
  const auto found = object.find(key);
  return found != object.end() && found->is_number_integer() ? found->get<std::int64_t>()
                                                             : otherwise;
}

std::optional<StepMetrics> metrics_of(const json& line) {
  const auto step = integer_at(line, "step", -1);
  const auto data = line.find("data");
  if (step < 0 || data == line.end() || !data->is_object()) return std::nullopt;
  StepMetrics metrics{.step = step, .time = number_at(line, "time").value_or(0)};
  for (const auto& [name, value] : data->items()) {
    if (value.is_number()) metrics.values[name] = value.get<double>();
    if (value.is_null()) metrics.values[name] = std::numeric_limits<double>::quiet_NaN();
  }
  return metrics;
}

std::optional<Span> span_of(const json& line) {
  const auto name = line.find("name");
  const auto start = number_at(line, "start");
  const auto end = number_at(line, "end");
  if (name == line.end() || !name->is_string() || !start || !end || !(*end >= *start))
    return std::nullopt;
  return Span{.name = name->get<std::string>(),
              .start = *start,
              .end = *end,
              .rank = static_cast<int>(integer_at(line, "rank", 0)),
              .step = integer_at(line, "step", 0)};
}

}  // namespace

MetricHistory read_metrics(const fs::path& path) {
  MetricHistory history;
  std::map<std::int64_t, StepMetrics> steps;
  history.num_unreadable = for_each_line(path, "", [&](const json& line) {
    auto metrics = metrics_of(line);
    if (!metrics) return false;
    auto& step = steps[metrics->step];
    metrics->values.merge(step.values);  // what the line says stays, what it does not say is added
    step = std::move(*metrics);
    return true;
  });
  for (auto& [step, metrics] : steps) history.steps.push_back(std::move(metrics));
  return history;
}

std::vector<MetricSummary> summarize(const MetricHistory& history) {
  std::map<std::string, MetricSummary> summaries;
  for (const auto& step : history.steps) {
    for (const auto& [name, value] : step.values) {
      auto& summary = summaries[name];
      summary.name = name;
      if (!std::isfinite(value)) {
        if (summary.num_not_finite++ == 0) summary.first_not_finite = step.step;
        continue;
      }
      if (summary.num_finite++ == 0) summary.first = summary.least = summary.most = value;
      summary.last = value;
      summary.least = std::min(summary.least, value);
      summary.most = std::max(summary.most, value);
      summary.mean += (value - summary.mean) / static_cast<double>(summary.num_finite);
    }
  }
  std::vector<MetricSummary> all;
  all.reserve(summaries.size());
  for (auto& [name, summary] : summaries) all.push_back(std::move(summary));
  return all;
}

std::vector<Span> read_spans(const fs::path& path, std::optional<std::int64_t> step) {
  std::vector<Span> spans;
  for_each_line(path, step ? std::to_string(*step) : "", [&](const json& line) {
    auto span = span_of(line);
    if (span && (!step || span->step == *step)) spans.push_back(std::move(*span));
    return true;
  });
  return spans;
}

RunLog read_run(const fs::path& run) {
  const bool is_folder = fs::is_directory(run);
  RunLog log{.metrics_path = is_folder ? run / kMetricsFile : run};
  if (is_folder && !fs::exists(log.metrics_path)) {
    throw Error(ErrorKind::kNotFound, fmt::format("{}: holds no {}", run.string(), kMetricsFile),
                "name the folder of a run, or its file of metrics");
  }
  log.metrics = read_metrics(log.metrics_path);
  if (log.metrics.steps.empty() && log.metrics.num_unreadable > 0) {
    throw Error(
        ErrorKind::kCorrupt,
        fmt::format("{}: holds no metrics: of its {} lines none is {{\"step\": 1, \"data\": "
                    "{{...}}}}",
                    log.metrics_path.string(), log.metrics.num_unreadable),
        "name the folder of a run, or its file of metrics");
  }
  const auto folder = is_folder ? run : fs::absolute(run).parent_path();
  if (fs::exists(folder / kConfigFile)) log.config = distckpt::read_text(folder / kConfigFile);
  if (fs::exists(folder / kProgressFile)) {
    const auto progress = distckpt::json_or_discarded(distckpt::read_text(folder / kProgressFile));
    if (progress.is_object()) {
      const auto total = integer_at(progress, "total_steps", 0);
      if (total > 0) log.total_steps = total;
    }
  }
  std::error_code error;  // a run of verl has no such folder
  for (const auto& entry : fs::directory_iterator(folder / kTimelineFolder, error)) {
    if (entry.path().extension() == ".jsonl") log.timeline_paths.push_back(entry.path());
  }
  std::ranges::sort(log.timeline_paths);
  return log;
}

void write_total_steps(const fs::path& run, std::int64_t total_steps) {
  distckpt::replace_text(run / kProgressFile, json{{"total_steps", total_steps}}.dump() + "\n");
}

namespace {

// The steps of the spans at the end of a file: a long run's timeline is long.
std::set<std::int64_t> last_steps(const fs::path& path) {
  constexpr std::int64_t kTail = std::int64_t{4} << 20;
  const distckpt::ReadFile file(path);
  std::string tail(static_cast<std::size_t>(std::min(kTail, file.size())), '\0');
  file.read_at(file.size() - static_cast<std::int64_t>(tail.size()),
               std::as_writable_bytes(std::span(tail)));
  std::istringstream lines(tail);
  std::set<std::int64_t> steps;
  for (std::string line; std::getline(lines, line);) {
    const auto parsed = distckpt::json_or_discarded(line);
    const auto span = parsed.is_object() ? span_of(parsed) : std::nullopt;
    if (span) steps.insert(span->step);
  }
  return steps;
}

// The last step that all ranks wrote; without any, the least of their last ones. A rank that runs
// ahead of the others writes nothing in some of their steps.
std::optional<std::int64_t> last_common_step(const std::vector<fs::path>& paths) {
  std::optional<std::set<std::int64_t>> common;
  std::optional<std::int64_t> least;
  for (const auto& path : paths) {
    auto steps = last_steps(path);
    const auto last = steps.empty() ? 0 : *steps.rbegin();
    least = std::min(least.value_or(last), last);
    if (common) std::erase_if(*common, [&](auto step) { return !steps.contains(step); });
    if (!common) common = std::move(steps);
  }
  return common && !common->empty() ? *common->rbegin() : least;
}

}  // namespace

std::vector<Span> read_step_spans(const RunLog& run, std::optional<std::int64_t> step) {
  if (!step) step = last_common_step(run.timeline_paths);
  std::vector<Span> spans;
  for (const auto& path : run.timeline_paths)
    std::ranges::move(read_spans(path, step), std::back_inserter(spans));
  std::ranges::sort(spans, {},
                    [](const Span& one) { return std::tuple(one.rank, one.start, -one.end); });
  return spans;
}

}  // namespace ferry::trainer
