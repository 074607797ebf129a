#include "trainer/metrics/sample_log.h"

#include <charconv>
#include <cmath>
#include <limits>
#include <optional>
#include <sstream>
#include <system_error>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/json.h"
#include "distckpt/storage/file_io.h"
#include "distckpt/storage/filenames.h"

namespace ferry::trainer {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using nlohmann::ordered_json;

std::string line_of(const LoggedSample& sample, std::int64_t step) {
  ordered_json line{{"input", sample.input}, {"output", sample.output}};
  line["gts"] = sample.gts;
  line["score"] = std::isfinite(sample.score) ? ordered_json(sample.score) : ordered_json(nullptr);
  line["step"] = step;
  for (const auto& [name, value] : sample.extra) line[name] = value;
  return line.dump(-1, ' ', false, json::error_handler_t::replace) + "\n";
}

std::optional<std::int64_t> step_of(const fs::path& path) {
  if (path.extension() != ".jsonl") return std::nullopt;
  const auto stem = path.stem().string();
  std::int64_t step = 0;
  const auto [end, error] = std::from_chars(stem.data(), stem.data() + stem.size(), step);
  if (error != std::errc() || end != stem.data() + stem.size() || step < 0) return std::nullopt;
  return step;
}

std::optional<LoggedSample> sample_of(json line) {
  const auto has_text = [&](const char* key) {
    return line.contains(key) && line[key].is_string();
  };
  if (!line.is_object() || !has_text("input") || !has_text("output")) return std::nullopt;
  LoggedSample sample{.score = std::numeric_limits<double>::quiet_NaN()};
  for (auto& [key, value] : line.items()) {
    if (key == "input") {
      sample.input = value.get<std::string>();
    } else if (key == "output") {
      sample.output = value.get<std::string>();
    } else if (key == "gts") {
      sample.gts = std::move(value);
    } else if (key == "score") {
      if (value.is_number()) sample.score = value.get<double>();
    } else if (key != "step") {
      sample.extra[key] = std::move(value);
    }
  }
  return sample;
}

// A file of a step that a process which was killed has begun: "7.jsonl.15e396a1f1ca42eb.ferry-tmp".
bool is_unfinished(const fs::path& path) {
  return path.extension() == distckpt::kTemporarySuffix && step_of(path.stem().stem());
}

}  // namespace

void forget_steps(const fs::path& folder, std::int64_t first_step) {
  std::error_code error;
  fs::create_directories(folder, error);
  require(!error, ErrorKind::kIo, "{}: cannot be created: {}", folder.string(), error.message());
  std::vector<fs::path> forgotten;
  for (const auto& entry : fs::directory_iterator(folder))
    if (is_unfinished(entry.path()) || step_of(entry.path()).value_or(-1) >= first_step)
      forgotten.push_back(entry.path());
  for (const auto& path : forgotten) {
    fs::remove(path, error);
    require(!error, ErrorKind::kIo, "{}: cannot be removed: {}", path.string(), error.message());
  }
}

SampleLog::SampleLog(fs::path folder, std::int64_t first_step) : folder_(std::move(folder)) {
  forget_steps(folder_, first_step);
}

void SampleLog::write(std::int64_t step, std::span<const LoggedSample> samples) const {
  std::string text;
  for (const auto& sample : samples) text += line_of(sample, step);
  distckpt::replace_text(folder_ / fmt::format("{}.jsonl", step), text);
}

std::map<std::int64_t, fs::path> sample_files(const fs::path& folder) {
  std::map<std::int64_t, fs::path> files;
  if (!fs::is_directory(folder)) return files;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (const auto step = step_of(entry.path())) files[*step] = entry.path();
  }
  return files;
}

StepSamples read_samples(const fs::path& path) {
  StepSamples found;
  std::istringstream lines(distckpt::read_text(path));
  for (std::string line; std::getline(lines, line);) {
    if (line.empty()) continue;
    if (auto sample = sample_of(distckpt::json_or_discarded(line)))
      found.samples.push_back(std::move(*sample));
    else
      ++found.num_unreadable;
  }
  return found;
}

}  // namespace ferry::trainer
