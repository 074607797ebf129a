#include <fmt/format.h>

#include <algorithm>

#include "cli/report/html.h"
#include "cli/report/text.h"
#include "cli/torch/report/logits_report.h"

namespace ferry::cli {
namespace {

using converter::LogitsReport;
using converter::OutputDifference;
using converter::SequenceDifference;

constexpr double kBar = 14;      // of one module
constexpr double kHeight = 150;  // of a bar in which every value differs
constexpr double kLeft = 46;
constexpr double kTop = 10;

double share(const OutputDifference& difference) {
  return difference.elements == 0
             ? 0.0
             : static_cast<double>(difference.unequal) / static_cast<double>(difference.elements);
}

// "decoder.layers.12.mlp" -> "12"; "" for what is no whole layer.
std::string layer_label(const std::string& module) {
  constexpr std::string_view kPrefix = "decoder.layers.";
  if (!module.starts_with(kPrefix)) return "";
  const auto rest = module.substr(kPrefix.size());
  return rest.find('.') == std::string::npos ? rest : "";
}

// One bar for each module, in the order in which they are computed: the share of values that
// differ.
std::string bars(const SequenceDifference& sequence) {
  auto modules = sequence.modules;
  modules.push_back(sequence.logits);
  const double width = kLeft + kBar * static_cast<double>(modules.size()) + 40;
  auto svg =
      fmt::format("<svg width=\"{0}\" height=\"{1}\" viewBox=\"0 0 {0} {1}\" role=\"img\">\n",
                  width, kTop + kHeight + 34);
  for (const double level : {0.0, 0.5, 1.0}) {
    const double y = kTop + kHeight * (1 - level);
    svg += fmt::format(
        "<line class=\"grid\" x1=\"{}\" x2=\"{}\" y1=\"{}\" y2=\"{}\"/><text class=\"layer\" "
        "x=\"{}\" "
        "y=\"{}\">{:.0f} %</text>\n",
        kLeft, width, y, y, kLeft - 6, y + 4, 100 * level);
  }
  const std::size_t every = 1 + modules.size() / 90;  // labels stay apart
  std::size_t labels = 0;
  for (std::size_t i = 0; i < modules.size(); ++i) {
    const auto& module = modules[i];
    const double x = kLeft + kBar * static_cast<double>(i);
    const double height = module.unequal == 0 ? 2 : std::max(4.0, kHeight * share(module));
    svg += fmt::format(
        "<rect class=\"bar{}\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"><title>{}: {} of {} "
        "values differ, "
        "by {:.3g} at most ({} ulps)</title></rect>\n",
        module.unequal == 0 ? " equal" : "", x + 1, kTop + kHeight - height, kBar - 2, height,
        escape_xml(module.module), format_count(module.unequal), format_count(module.elements),
        module.largest, format_count(module.largest_ulps));
    const auto label = module.module == "logits" ? module.module : layer_label(module.module);
    if (label.empty() || (label != "logits" && labels++ % every != 0)) continue;
    svg += fmt::format("<text class=\"axis\" x=\"{}\" y=\"{}\">{}</text>\n", x + kBar / 2,
                       kTop + kHeight + (label == "logits" ? 32 : 17), label);
  }
  return svg + "</svg>\n";
}

}  // namespace

std::string logits_html(const LogitsSubject& subject, const LogitsReport& report) {
  auto html = fmt::format("<h1>{}</h1>\n", report.equal() ? "Equal in every bit" : "Not equal");
  html += "<div class=\"tiles\">\n";
  std::int64_t unequal = 0;
  std::int64_t elements = 0;
  double log_prob = 0;
  for (const auto& sequence : report.sequences) {
    unequal += sequence.logits.unequal;
    elements += sequence.logits.elements;
    log_prob = std::max(log_prob, sequence.largest_log_prob);
  }
  html += tile(unequal == 0 ? "none" : format_count(unequal),
               fmt::format("of {} logits differ", format_count(elements)));
  html += tile(fmt::format("{:.3g}", log_prob), "largest difference of a log-probability");
  if (const auto first = report.first_difference()) {
    html += tile(first->second.module, fmt::format("differs first, in sequence {}", first->first));
  }
  html += "</div>\n<pre>" + escape_xml(logits_text(subject, report)) + "</pre>\n";
  for (std::size_t i = 0; i < report.sequences.size(); ++i) {
    html += fmt::format("<h2>Sequence {}: {} tokens</h2>\n<div class=\"scroll\">{}</div>\n", i,
                        report.sequences[i].num_tokens, bars(report.sequences[i]));
  }
  html +=
      "<p class=\"dim\">Bars: the share of values that differ, after each module in the order of "
      "the "
      "computation: embedding, each layer's attention, feed-forward network and sum, the last "
      "norm, "
      "the logits. Point at one for its numbers.</p>\n";
  return html_page("Logits beside a reference", html);
}

}  // namespace ferry::cli
