#include "cli/report/chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <string_view>

#include "cli/report/html.h"
#include "distckpt/base/integers.h"

namespace ferry::cli {
namespace {

constexpr double kChartWidth = 520;
constexpr double kChartHeight = 220;
constexpr double kChartLeft = 54;
constexpr double kChartRight = 24;
constexpr double kChartTop = 10;
constexpr double kChartBottom = 26;
constexpr std::size_t kMostPoints = 400;   // of a curve, before neighbours become one
constexpr std::size_t kMostColumns = 130;  // that tell their values to the pointer
constexpr std::size_t kMostDots = 40;      // a curve of fewer points shows them
constexpr std::size_t kLeastToSmooth = 40;

struct Point {
  double step = 0;
  double value = 0;  // the mean of those that it stands for
  double least = 0;
  double most = 0;
};

// Runs of finite points; more than kMostPoints steps are put together.
std::vector<std::vector<Point>> runs_of(const Series& series) {
  std::vector<std::vector<Point>> runs(1);
  const auto group = distckpt::ceil_div(series.values.size(), kMostPoints);
  for (std::size_t i = 0; i < series.values.size(); i += group) {
    Point point{.least = std::numeric_limits<double>::infinity(),
                .most = -std::numeric_limits<double>::infinity()};
    double count = 0;
    for (std::size_t j = i; j < std::min(i + group, series.values.size()); ++j) {
      const auto value = series.values[j];
      if (!std::isfinite(value)) continue;
      ++count;
      point.step += (series.steps[j] - point.step) / count;
      point.value += (value - point.value) / count;
      point.least = std::min(point.least, value);
      point.most = std::max(point.most, value);
    }
    if (count > 0) {
      runs.back().push_back(point);
    } else if (!runs.back().empty()) {
      runs.emplace_back();
    }
  }
  return runs;
}

// The mean of each point and its neighbours: about a twentieth of the curve, at its ends half of
// that.
std::vector<Point> smoothed(const std::vector<Point>& points) {
  std::vector<double> sums{0};
  for (const auto& point : points) sums.push_back(sums.back() + point.value);
  const auto reach = points.size() / 40;
  auto means = points;
  for (std::size_t i = 0; i < points.size(); ++i) {
    const auto begin = i - std::min(i, reach);
    const auto end = std::min(i + reach + 1, points.size());
    means[i].value = (sums[end] - sums[begin]) / static_cast<double>(end - begin);
  }
  return means;
}

// Maps numbers to places in the picture.
class Scales {
 public:
  Scales(const ChartOptions& options, const std::vector<Series>& series)
      : logarithmic_(options.logarithmic), whole_(options.axis == "step") {
    for (const auto& one : series) {
      for (std::size_t i = 0; i < one.values.size(); ++i) {
        if (!std::isfinite(one.values[i])) continue;
        first_ = std::min(first_, one.steps[i]);
        last_ = std::max(last_, one.steps[i]);
        low_ = std::min(low_, one.values[i]);
        high_ = std::max(high_, one.values[i]);
      }
    }
    if (empty()) return;
    logarithmic_ = logarithmic_ && low_ > 0 && high_ / low_ > 10;
    if (first_ == last_) last_ = first_ + 1;
    if (logarithmic_) {
      low_ *= 0.9;
      high_ *= 1.1;
      return;
    }
    if (low_ == high_ && !(options.from_zero && low_ != 0)) constant_ = low_;
    const bool keeps_zero = options.from_zero || low_ == 0;
    if (options.from_zero) low_ = std::min(low_, 0.0);
    const auto room =
        high_ > low_ ? (high_ - low_) * 0.06 : (high_ == 0 ? 1 : std::abs(high_) * 0.1);
    high_ += room;
    if (!keeps_zero || low_ < 0) low_ -= room;
  }

  bool empty() const { return first_ > last_; }
  double x(double step) const {
    return kChartLeft +
           (step - first_) / (last_ - first_) * (kChartWidth - kChartLeft - kChartRight);
  }
  double y(double value) const {
    const auto share = logarithmic_ ? std::log(value / low_) / std::log(high_ / low_)
                                    : (value - low_) / (high_ - low_);
    return kChartHeight - kChartBottom - share * (kChartHeight - kChartTop - kChartBottom);
  }
  std::vector<double> step_ticks() const {
    auto ticks = round_ticks(first_, last_, 6);
    if (whole_) std::erase_if(ticks, [](double tick) { return tick != std::floor(tick); });
    return ticks;
  }
  std::vector<double> value_ticks() const {
    if (constant_) return {*constant_};
    if (!logarithmic_) return round_ticks(low_, high_, 5);
    std::vector<double> ticks;
    const auto decades = std::log10(high_ / low_);
    for (auto power = std::floor(std::log10(low_)); power <= std::log10(high_); ++power) {
      for (const double digit : {1.0, 2.0, 5.0}) {
        const auto tick = digit * std::pow(10, power);
        if (tick >= low_ && tick <= high_ && (digit == 1 || decades < 2)) ticks.push_back(tick);
      }
    }
    return ticks;
  }

 private:
  bool logarithmic_;
  bool whole_;                        // places on the axis
  std::optional<double> constant_{};  // all there is to mark
  double first_ = std::numeric_limits<double>::infinity();
  double last_ = -std::numeric_limits<double>::infinity();
  double low_ = std::numeric_limits<double>::infinity();
  double high_ = -std::numeric_limits<double>::infinity();
};

std::string axes(const Scales& scales) {
  std::string svg;
  for (const auto tick : scales.value_ticks()) {
    svg += fmt::format(
        "<line class=\"grid\" x1=\"{}\" x2=\"{}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/>"
        "<text class=\"layer\" x=\"{}\" y=\"{:.1f}\">{}</text>\n",
        kChartLeft, kChartWidth - kChartRight, scales.y(tick), scales.y(tick), kChartLeft - 8,
        scales.y(tick) + 4, short_number(tick));
  }
  for (const auto tick : scales.step_ticks()) {
    svg += fmt::format("<text class=\"axis\" x=\"{:.1f}\" y=\"{}\">{}</text>\n", scales.x(tick),
                       kChartHeight - 7, short_number(tick));
  }
  return svg;
}

std::string path(const std::vector<Point>& points, const Scales& scales) {
  std::string d;
  for (const auto& point : points)
    d += fmt::format("{}{:.1f} {:.1f}", d.empty() ? "M" : "L", scales.x(point.step),
                     scales.y(point.value));
  return d;
}

// Between the least and the most of steps that were put together.
std::string band(const std::vector<Point>& points, const Scales& scales) {
  std::string d;
  for (const auto& point : points)
    d += fmt::format("{}{:.1f} {:.1f}", d.empty() ? "M" : "L", scales.x(point.step),
                     scales.y(point.most));
  for (auto point = points.rbegin(); point != points.rend(); ++point)
    d += fmt::format("L{:.1f} {:.1f}", scales.x(point->step), scales.y(point->least));
  return d + "Z";
}

std::string curve(const Series& series,
                  const ChartOptions& options,
                  const Scales& scales,
                  const std::string& colour) {
  std::string svg;
  for (const auto& points : runs_of(series)) {
    if (points.empty()) continue;
    const bool is_grouped = series.values.size() > kMostPoints;
    const bool is_smoothed = options.smooth && points.size() >= kLeastToSmooth;
    if (is_grouped)
      svg += fmt::format("<path class=\"band {}\" d=\"{}\"/>\n", colour, band(points, scales));
    if (is_smoothed) {
      svg +=
          fmt::format("<path class=\"curve faint {}\" d=\"{}\"/>\n", colour, path(points, scales));
    }
    svg += fmt::format("<path class=\"curve {}\" d=\"{}\"/>\n", colour,
                       path(is_smoothed ? smoothed(points) : points, scales));
    if (points.size() > kMostDots) continue;
    for (const auto& point : points) {
      svg += fmt::format("<circle class=\"dot {}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"2.6\"/>\n",
                         colour, scales.x(point.step), scales.y(point.value));
    }
  }
  return svg;
}

// Columns that show a line and tell the values of their step.
std::string columns(const std::vector<Series>& series,
                    const ChartOptions& options,
                    const Scales& scales) {
  const auto longest =
      std::ranges::max_element(series, {}, [](const Series& one) { return one.steps.size(); });
  const auto& steps = longest->steps;
  const auto every = distckpt::ceil_div(steps.size(), kMostColumns);
  std::string svg;
  for (std::size_t i = 0; i < steps.size(); i += every) {
    auto text = options.axis == "step" ? fmt::format("step {}", steps[i])
                                       : fmt::format("{} {:.4g}", options.axis, steps[i]);
    for (const auto& one : series) {
      const auto next = std::ranges::upper_bound(one.steps, steps[i]);
      if (next == one.steps.begin()) continue;
      const auto found = next - 1;
      if (*found != steps[i] && !options.compares) continue;
      text += fmt::format(
          "\n{}{:.6g} {}", series.size() > 1 || options.compares ? one.name + ": " : "",
          one.values[static_cast<std::size_t>(found - one.steps.begin())], options.unit);
    }
    const auto x = scales.x(steps[i]);
    const auto begin = i == 0 ? kChartLeft : (x + scales.x(steps[i - every])) / 2;
    const auto end =
        i + every < steps.size() ? (x + scales.x(steps[i + every])) / 2 : kChartWidth - kChartRight;
    svg += fmt::format(
        "<g class=\"column\"><title>{0}</title><rect x=\"{1:.1f}\" width=\"{2:.1f}\" y=\"{3}\" "
        "height=\"{4}\"/><line x1=\"{5:.1f}\" x2=\"{5:.1f}\" y1=\"{3}\" y2=\"{6}\"/></g>\n",
        escape_xml(text), begin, std::max(0.1, end - begin), kChartTop,
        kChartHeight - kChartTop - kChartBottom, x, kChartHeight - kChartBottom);
  }
  return svg;
}

std::vector<Series> with_values(std::vector<Series> series) {
  std::erase_if(series, [](const Series& one) {
    return std::ranges::none_of(one.values, [](double value) { return std::isfinite(value); });
  });
  return series;
}

std::string last_value(const Series& series, const std::string& unit) {
  const auto last = std::find_if(series.values.rbegin(), series.values.rend(),
                                 [](double value) { return std::isfinite(value); });
  if (last == series.values.rend()) return {};
  return short_number(*last) + (unit.empty() ? "" : " " + unit);
}

std::string colour_of(const Series& series, std::size_t index) {
  return series.colour.empty() ? colour_class(index) : series.colour;
}

// One picture of a figure.
std::string picture(const ChartOptions& options,
                    const std::vector<Series>& drawn,
                    const Scales& scales,
                    std::string_view classes) {
  auto svg = fmt::format(
      "<svg{} viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{} over the {}s\">\n"
      "<text class=\"layer\" x=\"{}\" y=\"{}\">{}</text>\n{}",
      classes, kChartWidth, kChartHeight, escape_xml(options.title), options.axis, kChartLeft - 8,
      kChartHeight - 7, options.axis, axes(scales));
  for (std::size_t i = 0; i < drawn.size(); ++i)
    svg += curve(drawn[i], options, scales, colour_of(drawn[i], i));
  return svg + columns(drawn, options, scales) + "</svg>\n";
}

}  // namespace

std::vector<double> round_ticks(double low, double high, int count) {
  const auto raw = (high - low) / count;
  if (!(raw > 0) || !std::isfinite(raw)) return {low};
  const auto power = std::pow(10, std::floor(std::log10(raw)));
  const auto digit = raw / power;
  const auto step = power * (digit < 1.5 ? 1 : digit < 3.5 ? 2 : digit < 7.5 ? 5 : 10);
  std::vector<double> ticks;
  for (auto i = std::ceil(low / step); i * step <= high; ++i)
    ticks.push_back(i * step + 0.0);  // no -0
  return ticks;
}

std::string short_number(double value) {
  const auto magnitude = std::abs(value);
  if (magnitude != 0 && magnitude < 1e-3) {
    auto text = fmt::format("{:.2g}", value);
    if (const auto zero = text.find("e-0"); zero != std::string::npos) text.erase(zero + 2, 1);
    return text;
  }
  if (magnitude < 10'000) return fmt::format("{:.4g}", value);
  if (magnitude < 1e6) return fmt::format("{:.4g}k", value / 1e3);
  if (magnitude < 1e9) return fmt::format("{:.4g}M", value / 1e6);
  if (magnitude < 1e12) return fmt::format("{:.4g}G", value / 1e9);
  if (magnitude < 1e15) return fmt::format("{:.4g}T", value / 1e12);
  return fmt::format("{:.2g}", value);
}

std::string short_time(double seconds) {
  if (seconds >= 1) return fmt::format("{:.4g} s", seconds);
  return seconds >= 1e-3 ? fmt::format("{:.3g} ms", seconds * 1e3)
                         : fmt::format("{:.3g} µs", seconds * 1e6);
}

std::string colour_class(std::size_t index) {
  return fmt::format("c{}", index % 12);
}

std::string line_chart(const ChartOptions& options,
                       const std::vector<Series>& series,
                       const OtherAxis& other) {
  const auto drawn = with_values(series);
  const Scales scales(options, drawn);
  if (scales.empty()) return {};
  auto html =
      fmt::format("<figure class=\"chart\">\n<figcaption><b>{}</b>", escape_xml(options.title));
  for (std::size_t i = 0; i < drawn.size(); ++i) {
    const bool is_named = drawn.size() > 1 || options.compares;
    const auto name = is_named ? escape_xml(drawn[i].name) + " " : "";
    html += fmt::format("<span><i class=\"{}\"></i>{}{}</span>", colour_of(drawn[i], i), name,
                        escape_xml(last_value(drawn[i], options.unit)));
  }
  html += "</figcaption>\n";
  if (other.axis.empty()) return html + picture(options, drawn, scales, "") + "</figure>\n";
  html += picture(options, drawn, scales, " class=\"over-steps\"");
  auto timed = options;
  timed.axis = other.axis;
  const auto drawn_over = with_values(other.series);
  return html + picture(timed, drawn_over, {timed, drawn_over}, " class=\"over-time\"") +
         "</figure>\n";
}

std::string chart_file(const ChartOptions& options, const std::vector<Series>& series) {
  constexpr double kTitle = 22;
  constexpr double kLegendRow = 18;
  constexpr double kCharWidth = 6.6;
  constexpr double kBelow = 18;
  const auto drawn = with_values(series);
  const Scales scales(options, drawn);
  if (scales.empty()) return {};
  auto body = fmt::format("<text x=\"16\" y=\"{}\" font-weight=\"600\">{}</text>\n", kTitle,
                          escape_xml(options.title));
  double x = kChartLeft;
  double y = kTitle + kLegendRow;
  for (std::size_t i = 0; i < drawn.size(); ++i) {
    const auto width = 32 + kCharWidth * static_cast<double>(drawn[i].name.size());
    if (x > kChartLeft && x + width > kChartWidth) {
      x = kChartLeft;
      y += kLegendRow;
    }
    body += fmt::format(
        "<path class=\"curve {}\" d=\"M{:.1f} {:.1f}h14\"/><text x=\"{:.1f}\" "
        "y=\"{:.1f}\">{}</text>\n",
        colour_class(i), x, y - 4, x + 19, y, escape_xml(drawn[i].name));
    x += width;
  }
  body += fmt::format("<g transform=\"translate(0 {})\">\n{}", y + 6, axes(scales));
  for (std::size_t i = 0; i < drawn.size(); ++i)
    body += curve(drawn[i], options, scales, colour_class(i));
  body +=
      fmt::format("<text class=\"axis\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>\n</g>\n",
                  (kChartLeft + kChartWidth - kChartRight) / 2, kChartHeight + 10, options.axis);
  return svg_file(static_cast<int>(kChartWidth), static_cast<int>(y + 6 + kChartHeight + kBelow),
                  fmt::format("{} over the {}s", options.title, options.axis), body);
}

}  // namespace ferry::cli
