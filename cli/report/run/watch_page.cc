#include "cli/report/run/watch_page.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>

#include "cli/report/chart.h"
#include "cli/report/run/run_curves.h"
#include "cli/report/text.h"
#include "distckpt/base/printable.h"

namespace ferry::cli {
namespace {

using trainer::RunLog;
using trainer::StepMetrics;

constexpr int kStepsOfPace = 10;  // the last ones, whose time tells how long a step takes
constexpr std::string_view kTiming = "timing_s/";

// The characters of a text in UTF-8.
int width_of(std::string_view text) {
  return static_cast<int>(std::ranges::count_if(
      text, [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
}

std::string cut(std::string text, int columns) {
  int width = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool begins = (static_cast<unsigned char>(text[i]) & 0xc0) != 0x80;
    if (begins && ++width > columns) return text.substr(0, i);
  }
  return text;
}

std::string padded(std::string text, int columns) {
  text.append(static_cast<std::size_t>(std::max(0, columns - width_of(text))), ' ');
  return text;
}

// The least and the greatest of the finite values.
std::pair<double, double> range_of(const std::vector<double>& values) {
  auto least = std::numeric_limits<double>::infinity();
  auto most = -least;
  for (const auto value : values) {
    if (!std::isfinite(value)) continue;
    least = std::min(least, value);
    most = std::max(most, value);
  }
  return {least, most};
}

std::string bar(double share, int columns, bool unicode) {
  const auto filled = static_cast<int>(std::lround(std::clamp(share, 0.0, 1.0) * columns));
  std::string text;
  for (int i = 0; i < filled; ++i) text += unicode ? "█" : "#";
  return text;
}

// Seconds from one step to the next, lately; nothing if no step has a time.
std::optional<double> pace(const std::vector<StepMetrics>& steps) {
  if (steps.empty()) return std::nullopt;
  const auto& last = steps.back();
  for (const auto& first : steps) {
    if (first.step < last.step - kStepsOfPace || first.time <= 0 || first.step >= last.step)
      continue;
    return (last.time - first.time) / static_cast<double>(last.step - first.step);
  }
  const auto found = last.values.find("perf/time_per_step");
  return found == last.values.end() ? std::nullopt : std::optional(found->second);
}

std::string state_of(const RunLog& run, double now) {
  const auto& steps = run.metrics.steps;
  if (steps.empty()) return "no step is complete yet";
  const auto& last = steps.back();
  if (run.total_steps && last.step >= *run.total_steps) return "complete";
  if (last.time <= 0) return "";
  const auto age = std::max(0.0, now - last.time);
  const auto seconds = pace(steps).value_or(0);
  const bool late = age > 60 && age > 5 * seconds;
  return fmt::format("{} {}", late ? "no step for" : "last step", format_seconds(age)) +
         (late ? "" : " ago");
}

std::string header(const RunLog& run, double now, const WatchScreen& screen) {
  const auto& steps = run.metrics.steps;
  const auto done = steps.empty() ? 0 : steps.back().step;
  auto line = fmt::format("step {}", done);
  if (run.total_steps) {
    const auto share = static_cast<double>(done) / static_cast<double>(*run.total_steps);
    line += fmt::format("/{}  [{}]", *run.total_steps, padded(bar(share, 20, screen.unicode), 20));
  }
  const auto seconds = pace(steps);
  if (seconds) line += fmt::format("  {} a step", format_seconds(*seconds));
  if (seconds && run.total_steps && done < *run.total_steps)
    line += fmt::format("  {} left",
                        format_seconds(*seconds * static_cast<double>(*run.total_steps - done)));
  const auto state = state_of(run, now);
  return line + (state.empty() ? "" : "  " + state);
}

struct Course {
  std::string title{};
  std::string unit{};
  std::vector<double> values{};  // at least one is finite
};

std::optional<Course> course_of(const RunLog& run,
                                std::string_view metric,
                                std::string title,
                                std::string unit) {
  auto values = series_of(run.metrics, metric, "").values;
  const bool tells = std::ranges::any_of(
      values, [&](double value) { return std::isfinite(value) && (unit != "GiB" || value != 0); });
  if (!tells) return std::nullopt;
  return Course{.title = std::move(title), .unit = std::move(unit), .values = std::move(values)};
}

std::vector<Course> courses_of(const RunLog& run) {
  std::vector<Course> courses;
  for (const auto& summary : trainer::summarize(run.metrics)) {
    const auto name = validation_name(summary.name);
    if (!name || !name->is_core || !name->statistic.starts_with("mean@")) continue;
    auto title = fmt::format("{} {}", printable(name->quantity), name->statistic);
    if (auto course = course_of(run, summary.name, std::move(title), ""))
      courses.push_back(std::move(*course));
  }
  for (const auto& panel : panels()) {
    for (const auto& [metric, name] : panel.metrics) {
      auto course = course_of(run, metric, panel.options.title, panel.options.unit);
      if (!course) continue;
      courses.push_back(std::move(*course));
      break;
    }
  }
  return courses;
}

struct Columns {
  int title = 0;
  int value = 0;
};

std::string last_value(const Course& course) {
  const auto last = std::find_if(course.values.rbegin(), course.values.rend(),
                                 [](double value) { return std::isfinite(value); });
  return short_number(*last) + (course.unit.empty() ? "" : " " + course.unit);
}

Columns columns_of(const std::vector<Course>& courses, const WatchScreen& screen) {
  Columns columns;
  for (const auto& course : courses) {
    columns.title = std::max(columns.title, width_of(course.title));
    columns.value = std::max(columns.value, width_of(last_value(course)));
  }
  columns.title = std::min(columns.title, std::max(16, screen.columns / 3));
  return columns;
}

std::string course_line(const Course& course, const Columns& columns, const WatchScreen& screen) {
  const auto [least, most] = range_of(course.values);
  auto line = fmt::format("{}  {}  ", padded(cut(course.title, columns.title), columns.title),
                          padded(last_value(course), columns.value));
  constexpr int kRangeColumns = 22;
  const auto free = std::max(8, screen.columns - width_of(line) - kRangeColumns);
  line += padded(sparkline(course.values, free, screen.unicode), free);
  return line + fmt::format("  {} to {}", short_number(least), short_number(most));
}

// The parts of the last step that has some, the longest first.
std::vector<std::string> parts_of_step(const RunLog& run, const WatchScreen& screen) {
  const auto& steps = run.metrics.steps;
  std::vector<std::string> lines;
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    std::vector<std::pair<double, std::string>> parts;
    double sum = 0;
    for (const auto& [name, value] : step->values) {
      if (!name.starts_with(kTiming) || !std::isfinite(value) || value <= 0) continue;
      const auto part = name.substr(kTiming.size());
      if (part == "step") continue;
      parts.emplace_back(value, printable(part));
      sum += value;
    }
    if (parts.empty()) continue;
    std::ranges::sort(parts, std::ranges::greater());
    const auto whole = step->values.find("timing_s/step");
    const auto total = whole == step->values.end() ? sum : std::max(sum, whole->second);
    lines.push_back(fmt::format("parts of step {}", step->step));
    for (const auto& [seconds, name] : parts)
      lines.push_back(fmt::format("  {}  {:>9}  {:>3.0f} %  {}", padded(name, 22),
                                  short_time(seconds), 100 * seconds / total,
                                  bar(seconds / total, screen.columns - 46, screen.unicode)));
    return lines;
  }
  return lines;
}

std::vector<std::string> warnings_of(const RunLog& run) {
  std::vector<std::string> lines;
  for (const auto& one : trainer::summarize(run.metrics)) {
    if (one.num_not_finite == 0) continue;
    lines.push_back(fmt::format("warning: {} is not finite in {} steps, at step {} first",
                                printable(one.name), one.num_not_finite, one.first_not_finite));
  }
  return lines;
}

}  // namespace

std::string sparkline(const std::vector<double>& values, int columns, bool unicode) {
  static constexpr std::array<const char*, 8> kBlocks{"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  static constexpr std::array<const char*, 8> kAscii{"_", ".", ",", "-", "=", "+", "*", "#"};
  const auto parts =
      std::min<std::size_t>(values.size(), static_cast<std::size_t>(std::max(columns, 1)));
  std::vector<double> means;
  for (std::size_t i = 0; i < parts; ++i) {
    double sum = 0;
    int count = 0;
    for (auto j = values.size() * i / parts; j < values.size() * (i + 1) / parts; ++j) {
      if (!std::isfinite(values[j])) continue;
      sum += values[j];
      ++count;
    }
    means.push_back(count == 0 ? std::numeric_limits<double>::quiet_NaN() : sum / count);
  }
  const auto [least, most] = range_of(means);
  const bool varies = most - least > 1e-9 * std::max(std::abs(least), std::abs(most));
  std::string line;
  for (const auto mean : means) {
    if (std::isnan(mean)) {
      line += ' ';
      continue;
    }
    const auto share = varies ? (mean - least) / (most - least) : 0.5;
    const auto level = std::min<std::size_t>(7, static_cast<std::size_t>(share * 8));
    line += unicode ? kBlocks[level] : kAscii[level];
  }
  return line;
}

std::vector<std::string> watch_page(const RunLog& run, double now, const WatchScreen& screen) {
  const auto courses = courses_of(run);
  const auto parts = parts_of_step(run, screen);
  const auto warnings = warnings_of(run);
  const auto folder = run.metrics_path.parent_path().string();
  std::vector<std::string> lines{printable(folder.empty() ? "." : folder),
                                 header(run, now, screen)};
  const auto rows = static_cast<std::size_t>(std::max(screen.rows, 2));
  const auto add = [&](const std::string& line) {
    if (lines.size() < rows) lines.push_back(line);
  };
  for (const auto& line : warnings) add(line);
  if (!courses.empty()) add("");
  // Parts of a step keep their place, as long as half of the rows are for metrics.
  const auto free = rows - lines.size();
  const auto of_parts = parts.empty() ? 0 : std::min(parts.size() + 1, free / 2);
  const auto of_courses = std::min(courses.size(), free - of_parts);
  const auto shown = of_courses < courses.size() && of_courses > 0 ? of_courses - 1 : of_courses;
  const auto columns = columns_of(courses, screen);
  for (std::size_t i = 0; i < shown; ++i) add(course_line(courses[i], columns, screen));
  if (shown < courses.size())
    add(fmt::format("{} more metrics: in a higher window, or by ferry report",
                    courses.size() - shown));
  if (!parts.empty()) add("");
  for (const auto& line : parts) add(line);
  for (auto& line : lines) line = cut(std::move(line), screen.columns);
  return lines;
}

}  // namespace ferry::cli
