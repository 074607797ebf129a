#include <fmt/format.h>

#include "cli/report/run/run.h"
#include "cli/report/text.h"

namespace ferry::cli {

std::string run_text(const RunReport& report) {
  const auto& history = report.log.metrics;
  auto text = fmt::format(
      "run      {}\nsteps    {}, {} metrics\n", report.log.metrics_path.string(),
      format_count(static_cast<std::int64_t>(history.steps.size())), report.summaries.size());
  if (!report.spans.empty())
    text +=
        fmt::format("timeline step {}, {} spans\n", report.spans.front().step, report.spans.size());
  for (const auto& set : report.samples) {
    text +=
        fmt::format("samples  {}, {} steps\n", set.folder.string(), format_count(set.num_steps));
  }
  for (const auto& one : report.summaries) {
    if (one.num_not_finite > 0) {
      text += fmt::format("warning  {} is not finite in {} steps, at step {} first\n", one.name,
                          one.num_not_finite, one.first_not_finite);
    }
  }
  return text;
}

nlohmann::ordered_json run_json(const RunReport& report) {
  auto metrics = nlohmann::ordered_json::object();
  for (const auto& one : report.summaries) {
    metrics[one.name] = {{"steps", one.num_finite + one.num_not_finite},
                         {"not_finite", one.num_not_finite}};
    if (one.num_finite == 0) continue;
    metrics[one.name].update({{"first", one.first},
                              {"last", one.last},
                              {"least", one.least},
                              {"mean", one.mean},
                              {"most", one.most}});
  }
  const auto& history = report.log.metrics;
  auto samples = nlohmann::ordered_json::array();
  for (const auto& set : report.samples)
    samples.push_back({{"folder", set.folder.string()}, {"steps", set.num_steps}});
  return {{"run", report.log.metrics_path.string()},
          {"last_step", history.steps.empty() ? 0 : history.steps.back().step},
          {"unreadable_lines", history.num_unreadable},
          {"metrics", std::move(metrics)},
          {"samples", std::move(samples)}};
}

}  // namespace ferry::cli
