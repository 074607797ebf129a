#include "cli/report/run/run_curves.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <set>
#include <span>
#include <utility>
#include <vector>

namespace ferry::cli {
namespace {

using trainer::MetricSummary;
using Names = std::set<std::string, std::less<>>;

// A unit of the wall clock, in which seconds since the first metrics of a run are told.
struct TimeUnit {
  std::string name{};  // "": the runs do not say when their steps were
  double seconds = 1;
};

TimeUnit time_unit(std::span<const RunReport> runs) {
  double longest = 0;
  for (const auto& run : runs) {
    const auto& steps = run.log.metrics.steps;
    if (steps.empty()) continue;
    if (steps.front().time <= 0 || !std::ranges::is_sorted(steps, {}, &trainer::StepMetrics::time))
      return {};
    longest = std::max(longest, steps.back().time - steps.front().time);
  }
  if (longest <= 0) return {};
  if (longest >= 3 * 3600) return {.name = "hour", .seconds = 3600};
  if (longest >= 3 * 60) return {.name = "minute", .seconds = 60};
  return {.name = "second"};
}

// A curve of a metric of a run.
struct CurveOf {
  const RunReport* run = nullptr;
  std::string metric{};
  std::string name{};    // in the legend
  std::string colour{};  // as of a series
};

// The figure of some curves: over the steps, and over the time where it has a unit.
std::string figure(const ChartOptions& options,
                   const std::vector<CurveOf>& curves,
                   const TimeUnit& unit) {
  std::vector<Series> series;
  OtherAxis over_time{.axis = unit.name};
  for (const auto& one : curves) {
    const auto& history = one.run->log.metrics;
    series.push_back(series_of(history, one.metric, one.name));
    series.back().colour = one.colour;
    if (unit.name.empty()) continue;
    auto& timed = over_time.series.emplace_back(series.back());
    timed.steps = series_of(history, one.metric, one.name, /*over_seconds=*/true).steps;
    for (auto& place : timed.steps) place /= unit.seconds;
  }
  return line_chart(options, series, over_time);
}

// "best@4/mean" is of 4.
int number_of(std::string_view statistic) {
  int number = 0;
  const auto begin = statistic.find('@') + 1;
  std::from_chars(statistic.data() + begin, statistic.data() + statistic.size(), number);
  return number;
}

// A chart of each quantity that was validated: of the largest number of answers, how good they are
// on average, the best, the one most agree on, the worst.
std::string validation_charts(const RunReport& report,
                              const TimeUnit& unit,
                              bool core,
                              Names& drawn) {
  struct Quantity {
    std::map<std::string, std::string> metrics{};  // by statistic
    int most = 0;                                  // answers
    bool is_core = false;
  };
  std::map<std::string, Quantity> quantities;
  for (const auto& summary : report.summaries) {
    const auto name = validation_name(summary.name);
    if (!name) continue;
    auto& quantity = quantities[name->quantity];
    quantity.metrics[name->statistic] = summary.name;
    quantity.most = std::max(quantity.most, number_of(name->statistic));
    quantity.is_core |= name->is_core;
  }
  std::string html;
  for (const auto& [title, quantity] : quantities) {
    // The others are in the table.
    for (const auto& [statistic, metric] : quantity.metrics) drawn.insert(metric);
    if (quantity.is_core != core) continue;
    std::vector<CurveOf> series;
    for (const auto& [kind, of_draws] :
         {std::pair("mean", ""), {"best", "/mean"}, {"maj", "/mean"}, {"worst", "/mean"}}) {
      const auto name = fmt::format("{}@{}", kind, quantity.most);
      const auto found = quantity.metrics.find(name + of_draws);
      if (found != quantity.metrics.end() && find_summary(report, found->second) != nullptr)
        series.push_back({.run = &report, .metric = found->second, .name = name});
    }
    if (series.empty()) continue;
    // The legend names curves only where there are several.
    const auto shown =
        fmt::format("Validation: {}{}", title, series.size() == 1 ? " " + series[0].name : "");
    html += figure({.title = shown, .from_zero = true}, series, unit);
  }
  return html;
}

// One chart of each metric that is not drawn yet; mean, max and min of a quantity share theirs.
std::string remaining_charts(const RunReport& report, const TimeUnit& unit, const Names& drawn) {
  constexpr std::array<std::string_view, 3> kStatistics{"mean", "max", "min"};
  std::map<std::string, std::map<std::size_t, std::string>> charts;  // by title; then by statistic
  for (const auto& summary : report.summaries) {
    const std::string_view name = summary.name;
    if (drawn.contains(name) || name.starts_with("timing_")) continue;
    const auto slash = name.rfind('/');
    const auto found = slash == std::string_view::npos
                           ? kStatistics.end()
                           : std::ranges::find(kStatistics, name.substr(slash + 1));
    if (found == kStatistics.end())
      charts[summary.name][0] = summary.name;
    else
      charts[std::string(name.substr(0, slash))]
            [static_cast<std::size_t>(found - kStatistics.begin()) + 1] = summary.name;
  }
  std::string html;
  for (const auto& [title, metrics] : charts) {
    std::vector<CurveOf> series;
    for (const auto& [statistic, metric] : metrics)
      series.push_back({.run = &report,
                        .metric = metric,
                        .name = statistic == 0 ? "" : std::string(kStatistics[statistic - 1])});
    const auto shown = metrics.size() == 1 ? metrics.begin()->second : title;
    html += figure({.title = shown, .smooth = true}, series, unit);
  }
  return html;
}

// True if a run has the metric. A run on the host fills no GPU.
bool tells(const RunReport& report, const std::string& metric, std::string_view unit) {
  const auto* const summary = find_summary(report, metric);
  return summary != nullptr && (unit != "GiB" || summary->least != 0 || summary->most != 0);
}

}  // namespace

const std::vector<Panel>& panels() {
  static const std::vector<Panel> all{
      {{.title = "Loss", .smooth = true}, {{"train/loss", "training"}, {"val/loss", "validation"}}},
      {{.title = "Score", .smooth = true},
       {{"critic/score/mean", "mean"},
        {"critic/score/max", "greatest"},
        {"critic/score/min", "least"}}},
      {{.title = "Policy loss", .smooth = true}, {{"actor/pg_loss", "actor"}}},
      {{.title = "Value loss", .smooth = true}, {{"critic/vf_loss", "critic"}}},
      {{.title = "KL divergence", .smooth = true},
       {{"actor/kl_loss", "to the reference"},
        {"actor/reward_kl_penalty", "to the reference, in the reward"},
        {"actor/ppo_kl", "to the old policy"}}},
      {{.title = "Share of tokens clipped", .smooth = true, .from_zero = true},
       {{"actor/pg_clipfrac", "policy"},
        {"actor/pg_clipfrac_lower", "policy, lower bound"},
        {"critic/vf_clipfrac", "values"}}},
      {{.title = "Entropy", .smooth = true}, {{"actor/entropy", "actor"}}},
      {{.title = "Response length", .unit = "tokens", .smooth = true, .from_zero = true},
       {{"response_length/mean", "mean"},
        {"response_length/max", "greatest"},
        {"response_length/min", "least"}}},
      {{.title = "Share of answers cut off at the limit", .smooth = true, .from_zero = true},
       {{"response_length/clip_ratio", ""}}},
      {{.title = "Rollout and trainer: difference of probabilities",
        .smooth = true,
        .from_zero = true},
       {{"training/rollout_probs_diff_mean", "mean"},
        {"training/rollout_probs_diff_max", "greatest"}}},
      {{.title = "Variance that the critic explains", .smooth = true},
       {{"critic/vf_explained_var", ""}}},
      {{.title = "Learning rate", .from_zero = true},
       {{"train/lr", "model"}, {"actor/lr", "actor"}, {"critic/lr", "critic"}}},
      {{.title = "Norm of the gradient", .logarithmic = true, .smooth = true},
       {{"train/grad_norm", "model"},
        {"actor/grad_norm", "actor"},
        {"critic/grad_norm", "critic"}}},
      {{.title = "Throughput", .unit = "tokens/s per GPU", .smooth = true, .from_zero = true},
       {{"perf/throughput", ""}}},
      {{.title = "Share of the peak (MFU)", .smooth = true, .from_zero = true},
       {{"train/mfu", "model"}, {"perf/mfu/actor", "actor"}, {"perf/mfu/critic", "critic"}}},
      {{.title = "Time of a step", .unit = "s", .smooth = true, .from_zero = true},
       {{"perf/time_per_step", ""}}},
      {{.title = "Memory of the GPU", .unit = "GiB", .from_zero = true},
       {{"perf/max_memory_allocated_gb", "allocated"},
        {"perf/max_memory_reserved_gb", "reserved"}}},
      {{.title = "Memory of the host", .unit = "GiB", .from_zero = true},
       {{"perf/cpu_memory_used_gb", ""}}},
  };
  return all;
}

RunCurves run_curves(const RunReport& report) {
  const auto unit = time_unit({&report, 1});
  RunCurves curves{.axis = unit.name};
  Names drawn;
  curves.main = validation_charts(report, unit, true, drawn);
  for (const auto& panel : panels()) {
    std::vector<CurveOf> series;
    for (const auto& [metric, name] : panel.metrics) {
      drawn.insert(metric);
      if (tells(report, metric, panel.options.unit))
        series.push_back({.run = &report, .metric = metric, .name = name});
    }
    if (!series.empty()) curves.main += figure(panel.options, series, unit);
  }
  curves.other =
      remaining_charts(report, unit, drawn) + validation_charts(report, unit, false, drawn);
  return curves;
}

RunCurves compared_curves(const std::vector<RunReport>& runs,
                          const std::vector<std::string>& names) {
  const auto unit = time_unit(runs);
  RunCurves curves{.axis = unit.name};
  Names all, drawn;
  for (const auto& run : runs)
    for (const auto& summary : run.summaries) all.insert(summary.name);
  const auto draw = [&](ChartOptions options, const std::string& metric) {
    std::vector<CurveOf> series;
    for (std::size_t i = 0; i < runs.size(); ++i)
      if (tells(runs[i], metric, options.unit))
        series.push_back(
            {.run = &runs[i], .metric = metric, .name = names[i], .colour = colour_class(i)});
    options.compares = true;
    drawn.insert(metric);
    return series.empty() ? std::string() : figure(options, series, unit);
  };
  for (const auto& metric : all) {
    const auto name = validation_name(metric);
    if (name && name->is_core && name->statistic.starts_with("mean@"))
      curves.main +=
          draw({.title = fmt::format("Validation: {} {}", name->quantity, name->statistic),
                .from_zero = true},
               metric);
  }
  for (const auto& panel : panels()) {
    for (const auto& [metric, name] : panel.metrics) {
      auto options = panel.options;
      if (panel.metrics.size() > 1) options.title += fmt::format(": {}", name);
      curves.main += draw(options, metric);
    }
  }
  for (const auto& metric : all)
    if (!drawn.contains(metric) && !metric.starts_with("timing_"))
      curves.other += draw({.title = metric, .smooth = true}, metric);
  return curves;
}

std::string axis_switch(const RunCurves& curves) {
  if (curves.axis.empty() || (curves.main.empty() && curves.other.empty())) return {};
  return "<input class=\"axis-switch\" type=\"radio\" name=\"axis\" id=\"axis-steps\" "
         "checked=\"checked\"/>\n<input class=\"axis-switch\" type=\"radio\" name=\"axis\" "
         "id=\"axis-time\"/>\n";
}

std::string axis_labels(const RunCurves& curves) {
  if (axis_switch(curves).empty()) return {};
  return fmt::format(
      "<p class=\"axes\">over <label for=\"axis-steps\">steps</label><label "
      "for=\"axis-time\">{}s</label></p>\n",
      curves.axis);
}

Series series_of(const trainer::MetricHistory& history,
                 std::string_view metric,
                 std::string name,
                 bool over_seconds) {
  Series series{.name = std::move(name)};
  for (const auto& step : history.steps) {
    const auto found = step.values.find(metric);
    if (found == step.values.end()) continue;
    series.steps.push_back(over_seconds ? step.time - history.steps.front().time
                                        : static_cast<double>(step.step));
    series.values.push_back(found->second);
  }
  return series;
}

const MetricSummary* find_summary(const RunReport& report, std::string_view metric) {
  const auto found = std::ranges::find(report.summaries, metric, &MetricSummary::name);
  return found == report.summaries.end() || found->num_finite == 0 ? nullptr : &*found;
}

std::optional<ValidationName> validation_name(std::string_view metric) {
  const bool is_core = metric.starts_with("val-core/");
  if (!is_core && !metric.starts_with("val-aux/")) return std::nullopt;
  const auto at = metric.rfind('@');
  if (at == std::string_view::npos) return std::nullopt;
  const auto begin = metric.find('/') + 1;
  const auto slash = metric.rfind('/', at);
  if (slash < begin) return std::nullopt;
  return ValidationName{.quantity = std::string(metric.substr(begin, slash - begin)),
                        .statistic = std::string(metric.substr(slash + 1)),
                        .is_core = is_core};
}

}  // namespace ferry::cli
