#include "trainer/metrics/timeline.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "distckpt/storage/file_io.h"
#include "trainer/metrics/metric_log.h"
#include "trainer/metrics/run_log.h"

namespace ferry::trainer {
namespace {

std::string line_of(const Span& span) {
  const nlohmann::ordered_json line{{"name", span.name},
                                    {"start", span.start},
                                    {"end", span.end},
                                    {"rank", span.rank},
                                    {"step", span.step}};
  return line.dump() + "\n";
}

std::filesystem::path prepare(const std::filesystem::path& folder,
                              int rank,
                              std::int64_t first_step) {
  auto path = folder / fmt::format("timeline_rank{}.jsonl", rank);
  if (!std::filesystem::exists(path)) return path;
  std::string kept;
  for (const auto& span : read_spans(path)) {
    if (span.step < first_step) kept += line_of(span);
  }
  distckpt::replace_text(path, kept);
  return path;
}

}  // namespace

Timeline::Timeline(const std::filesystem::path& folder, int rank, std::int64_t first_step)
    : file_(prepare(folder, rank, first_step)), rank_(rank) {}

Timeline::Scope::Scope(Timeline& timeline, std::string name)
    : timeline_(timeline), name_(std::move(name)), start_(steady_time()) {}

Timeline::Scope::~Scope() {
  timeline_.add(std::move(name_), start_, steady_time());
}

void Timeline::add(std::string name, double start, double end) {
  spans_.push_back(
      {.name = std::move(name), .start = start, .end = end, .rank = rank_, .step = step_});
}

std::map<std::string, double> Timeline::end_step() {
  std::string lines;
  std::map<std::string, double> seconds;
  for (const auto& span : spans_) {
    lines += line_of(span);
    if (span.name.find('/') == std::string::npos) seconds[span.name] += span.end - span.start;
  }
  file_.append(lines);
  spans_.clear();
  return seconds;
}

}  // namespace ferry::trainer
