#include "trainer/metrics/progress_line.h"

#include <fmt/format.h>

#include <cmath>
#include <vector>

namespace ferry::trainer {
namespace {

struct Shown {
  const char* metric;
  std::string (*text)(double value);
};

// In this order, those that a step has.
const std::vector<Shown> kShown{
    {"train/loss", [](double x) { return fmt::format("loss {:.4f}", x); }},
    {"val/loss", [](double x) { return fmt::format("val_loss {:.4f}", x); }},
    {"critic/score/mean", [](double x) { return fmt::format("score {:.4f}", x); }},
    {"actor/pg_loss", [](double x) { return fmt::format("pg_loss {:.4f}", x); }},
    {"train/grad_norm", [](double x) { return fmt::format("grad_norm {:.3g}", x); }},
    {"actor/grad_norm", [](double x) { return fmt::format("grad_norm {:.3g}", x); }},
    {"train/lr", [](double x) { return fmt::format("lr {:.3g}", x); }},
    {"actor/lr", [](double x) { return fmt::format("lr {:.3g}", x); }},
    {"perf/throughput", [](double x) { return fmt::format("{:.0f} tokens/s/GPU", x); }},
    {"perf/time_per_step", [](double x) { return fmt::format("{:.2f} s", x); }},
    {"perf/max_memory_allocated_gb", [](double x) { return fmt::format("{:.1f} GiB", x); }},
};

std::string duration(double seconds) {
  const auto minutes = static_cast<std::int64_t>(std::llround(seconds / 60));
  if (seconds < 90) return fmt::format("{:.0f} s", seconds);
  return minutes < 90 ? fmt::format("{} min", minutes)
                      : fmt::format("{} h {} min", minutes / 60, minutes % 60);
}

}  // namespace

std::string ProgressLine::format(const StepMetrics& step) {
  auto line = fmt::format("step {}/{}", step.step, total_steps_);
  for (const auto& [metric, text] : kShown) {
    const auto found = step.values.find(metric);
    if (found != step.values.end()) line += "  " + text(found->second);
  }
  if (!first_) first_ = step;
  if (step.step > first_->step && step.step < total_steps_) {
    const auto seconds = (step.time - first_->time) / static_cast<double>(step.step - first_->step);
    line +=
        fmt::format("  {} left", duration(seconds * static_cast<double>(total_steps_ - step.step)));
  }
  return line;
}

}  // namespace ferry::trainer
