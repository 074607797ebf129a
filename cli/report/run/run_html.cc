#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "cli/report/chart.h"
#include "cli/report/html.h"
#include "cli/report/run/run.h"
#include "cli/report/run/run_curves.h"
#include "cli/report/run/timeline_svg.h"
#include "cli/report/text.h"

namespace ferry::cli {
namespace {

using trainer::MetricSummary;

std::string header(const RunReport& report) {
  const auto& steps = report.log.metrics.steps;
  auto html =
      fmt::format("<h1>A training run</h1>\n<p><code>{}</code></p>\n<div class=\"tiles\">\n",
                  escape_xml(report.log.metrics_path.string()));
  html += tile(format_count(steps.empty() ? 0 : steps.back().step), "steps");
  const auto add = [&](std::string_view metric, double MetricSummary::*value, std::string_view unit,
                       std::string_view what) {
    const auto* summary = find_summary(report, metric);
    if (summary != nullptr) html += tile(short_number(summary->*value) + std::string(unit), what);
  };
  add("train/loss", &MetricSummary::last, "", "loss of the last step");
  add("val/loss", &MetricSummary::least, "", "least loss of validation");
  add("critic/score/mean", &MetricSummary::last, "", "mean score of the last step");
  for (const auto& summary : report.summaries) {
    const auto name = validation_name(summary.name);
    if (!name || !name->is_core || !name->statistic.starts_with("mean@")) continue;
    if (summary.num_finite > 0)
      html += tile(short_number(summary.last),
                   fmt::format("{} of {}, {} at first", name->statistic, name->quantity,
                               short_number(summary.first)));
  }
  add("perf/throughput", &MetricSummary::mean, "", "tokens/s per GPU, on average");
  add("perf/time_per_step", &MetricSummary::mean, " s", "a step, on average");
  const auto* memory = find_summary(report, "perf/max_memory_allocated_gb");
  if (memory != nullptr && memory->most > 0)  // else the run was on hosts
    html += tile(short_number(memory->most) + " GiB", "most memory of a GPU");
  const auto time = steps.empty() ? 0.0 : steps.back().time - steps.front().time;
  if (time > 0) html += tile(format_seconds(time), "from the first step to the last");
  return html + "</div>\n";
}

std::string notes(const RunReport& report) {
  std::string html;
  for (const auto& summary : report.summaries) {
    if (summary.num_not_finite == 0) continue;
    html += fmt::format(
        "<p class=\"warning\"><code>{}</code> is not finite in {} of {} steps, at step {} "
        "first.</p>\n",
        escape_xml(summary.name), summary.num_not_finite,
        summary.num_finite + summary.num_not_finite, summary.first_not_finite);
  }
  if (report.log.metrics.num_unreadable > 0) {
    html += fmt::format("<p class=\"dim\">{} lines of the file are no metrics.</p>\n",
                        report.log.metrics.num_unreadable);
  }
  return html;
}

// The parts of a step, as the trainer named them: timing_s/<part>. Parts may lie within each other,
// and some, as validation, are of a few steps alone.
std::string parts(const RunReport& report) {
  constexpr std::string_view kPrefix = "timing_s/";
  std::vector<const MetricSummary*> found;
  for (const auto& summary : report.summaries) {
    if (summary.name.starts_with(kPrefix) && summary.num_finite > 0) found.push_back(&summary);
  }
  if (found.empty()) return {};
  const auto seconds = [](const MetricSummary* part) {
    return part->mean * static_cast<double>(part->num_finite);
  };
  std::ranges::sort(found, std::greater(), seconds);
  const auto* step = find_summary(report, "perf/time_per_step");
  if (step == nullptr) step = found.front();
  std::string html = "<h2>Where the time of a step goes</h2>\n<table class=\"parts\">\n";
  for (const auto* part : found) {
    const auto share =
        seconds(step) > 0 ? std::clamp(seconds(part) / seconds(step), 0.0, 1.0) : 0.0;
    html += fmt::format(
        "<tr><th>{}</th><td><svg viewBox=\"0 0 100 10\" preserveAspectRatio=\"none\"><rect "
        "class=\"rail\" width=\"100\" height=\"10\"/><rect class=\"c0\" width=\"{:.2f}\" "
        "height=\"10\"/></svg></td><td>{}</td><td class=\"dim\">{:.1f}%</td></tr>\n",
        escape_xml(part->name.substr(kPrefix.size())), share * 100,
        short_time(seconds(part) / static_cast<double>(step->num_finite)), share * 100);
  }
  return html +
         "</table>\n<p class=\"dim\">Seconds of each part, on average over all steps. A part may "
         "lie within another.</p>\n";
}

std::string timeline(const RunReport& report) {
  const auto svg = timeline_svg(report.spans);
  if (svg.empty()) return {};
  return fmt::format(
      "<h2>Step {}, rank by rank</h2>\n<div class=\"scroll pad\">{}</div>\n<p class=\"dim\">Point "
      "at a span for its "
      "time.</p>\n",
      report.spans.front().step, svg);
}

std::string charts(std::string_view title,
                   std::string_view classes,
                   const std::string& figures,
                   const RunCurves& curves) {
  if (figures.empty()) return {};
  return fmt::format("<h2>{}</h2>\n{}<div class=\"{}\">\n{}</div>\n", title, axis_labels(curves),
                     classes, figures);
}

std::string numbers(const RunReport& report) {
  std::string html =
      "<h2>In numbers</h2>\n<div class=\"scroll\"><table class=\"numbers "
      "metrics\">\n<thead><tr><th>metric</th><th>first</th>"
      "<th>last</th><th>least</th><th>mean</th><th>most</th><th>steps</th></tr></thead>\n<tbody>\n";
  for (const auto& one : report.summaries) {
    html += fmt::format("<tr><td><code>{}</code></td>", escape_xml(one.name));
    if (one.num_finite > 0) {
      for (const auto value : {one.first, one.last, one.least, one.mean, one.most})
        html += fmt::format("<td>{:.6g}</td>", value);
    } else {
      html += "<td></td><td></td><td></td><td></td><td></td>";
    }
    html += fmt::format("<td>{}</td></tr>\n", format_count(one.num_finite + one.num_not_finite));
  }
  return html + "</tbody></table></div>\n";
}

// The runs, in the colours of their curves.
std::string runs_table(const std::vector<RunReport>& runs, const std::vector<std::string>& names) {
  std::string html =
      "<table class=\"sides\">\n<tr><th>run</th><th>steps</th><th>from the first to the "
      "last</th><th>metrics</th></tr>\n";
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const auto& steps = runs[i].log.metrics.steps;
    const auto seconds = steps.empty() ? 0.0 : steps.back().time - steps.front().time;
    html += fmt::format(
        "<tr><td><i class=\"block {}\"></i> {}</td><td>{}</td><td>{}</td><td><code>{}</code></td>"
        "</tr>\n",
        colour_class(i), escape_xml(names[i]), format_count(steps.empty() ? 0 : steps.back().step),
        seconds > 0 ? format_seconds(seconds) : "", escape_xml(runs[i].log.metrics_path.string()));
  }
  return html + "</table>\n";
}

std::string last_values(const std::vector<RunReport>& runs, const std::vector<std::string>& names) {
  std::string html =
      "<h2>Last values</h2>\n<div class=\"scroll\"><table class=\"numbers "
      "metrics\">\n<thead><tr><th>metric</th>";
  for (const auto& name : names) html += fmt::format("<th>{}</th>", escape_xml(name));
  html += "</tr></thead>\n<tbody>\n";
  std::set<std::string> metrics;
  for (const auto& run : runs)
    for (const auto& one : run.summaries) metrics.insert(one.name);
  for (const auto& metric : metrics) {
    html += fmt::format("<tr><td><code>{}</code></td>", escape_xml(metric));
    for (const auto& run : runs) {
      const auto* const summary = find_summary(run, metric);
      html += summary == nullptr ? "<td></td>" : fmt::format("<td>{:.6g}</td>", summary->last);
    }
    html += "</tr>\n";
  }
  return html + "</tbody></table></div>\n";
}

std::string configuration(const RunReport& report) {
  if (report.log.config.empty()) return {};
  return fmt::format(
      "<h2>Configuration</h2>\n<details><summary>{}</summary>\n<pre>{}</pre></details>\n",
      trainer::kConfigFile, escape_xml(report.log.config));
}

}  // namespace

std::string run_html(const RunReport& report) {
  const auto curves = run_curves(report);
  auto html = axis_switch(curves) + header(report) + notes(report) +
              charts("Curves", "charts", curves.main, curves);
  for (const auto& set : report.samples)
    html += sample_browser("Samples: " + set.folder.filename().string(), set);
  html += parts(report) + timeline(report) +
          charts("Other metrics", "charts small", curves.other, curves) + numbers(report) +
          configuration(report);
  return html_page(fmt::format("{}: a training run", report.log.metrics_path.string()), html);
}

std::string compare_html(const std::vector<RunReport>& runs,
                         const std::vector<std::string>& names) {
  const auto curves = compared_curves(runs, names);
  auto html = axis_switch(curves) + fmt::format("<h1>{} training runs</h1>\n", runs.size()) +
              runs_table(runs, names) + charts("Curves", "charts", curves.main, curves) +
              charts("Other metrics", "charts small", curves.other, curves) +
              last_values(runs, names);
  return html_page(fmt::format("{} training runs", runs.size()), html);
}

}  // namespace ferry::cli
