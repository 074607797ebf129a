#include <chrono>
#include <cmath>
#include <string>

#include "distckpt/base/json.h"
#include "distckpt/base/stopwatch.h"
#include "distckpt/storage/file_io.h"
#include "trainer/metrics/append_file.h"
#include "trainer/metrics/metric_log.h"
#include "trainer/metrics/run_log.h"

namespace ferry::trainer {
namespace {

std::string line_of(const StepMetrics& step) {
  auto data = nlohmann::ordered_json::object();
  for (const auto& [name, value] : step.values) {
    if (std::isfinite(value)) {
      data[name] = value;
    } else {
      data[name] = nullptr;
    }
  }
  const nlohmann::ordered_json line{
      {"step", step.step}, {"time", step.time}, {"data", std::move(data)}};
  return line.dump() + "\n";
}

// Rewrites the file without what is not before the step; a line that a kill cut off goes, too.
void forget(const std::filesystem::path& path, std::int64_t first_step) {
  if (!std::filesystem::exists(path)) return;
  std::string kept;
  for (const auto& step : read_metrics(path).steps) {
    if (step.step < first_step) kept += line_of(step);
  }
  distckpt::replace_text(path, kept);
}

class JsonlLog : public MetricLog {
 public:
  explicit JsonlLog(const std::filesystem::path& path) : file_(path) {}
  void write(const StepMetrics& step) override { file_.append(line_of(step)); }

 private:
  AppendFile file_;
};

}  // namespace

double wall_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

double steady_time() {
  static const double begin = wall_time();
  static const distckpt::Stopwatch since;
  return begin + since.seconds();
}

std::unique_ptr<MetricLog> open_jsonl_log(const std::filesystem::path& path,
                                          std::int64_t first_step) {
  forget(path, first_step);
  return std::make_unique<JsonlLog>(path);
}

}  // namespace ferry::trainer
