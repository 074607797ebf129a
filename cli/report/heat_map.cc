#include "cli/report/heat_map.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "cli/report/diff.h"
#include "cli/report/html.h"
#include "cli/report/text.h"

namespace ferry::cli {
namespace {

using converter::DiffCell;
using converter::DiffRow;
using converter::DiffTable;
using distckpt::ElementDifference;

constexpr int kCellWidth = 44;
constexpr int kGap = 2;
constexpr int kTotalGap = 14;  // before the column of whole layers
constexpr double kCharWidth = 6.6;
constexpr double kSlope = 0.7072;  // labels of columns stand at 45 degrees

std::string describe_difference(const ElementDifference& difference) {
  const auto& counts = difference.counts;
  if (counts.different == 0) {
    return fmt::format("equal: {} elements, norm {}", format_count(counts.elements),
                       format_number(difference.left_norm()));
  }
  auto text = fmt::format(
      "changed: {} of {} elements ({})\nrelative difference: {}\nnorms: A {}, B {}, A-B {}",
      format_count(counts.different), format_count(counts.elements),
      format_share(counts.changed_share()), format_number(difference.relative_difference()),
      format_number(difference.left_norm()), format_number(difference.right_norm()),
      format_number(difference.difference_norm()));
  if (counts.max_difference)
    text += fmt::format("\nlargest difference: {}", format_largest(counts));
  if (counts.max_ulps) text += fmt::format(", {} ulps", *counts.max_ulps);
  const auto nonfinite = format_nonfinite(counts);
  return nonfinite.empty() ? text : text + "\n" + nonfinite;
}

std::string describe_cell(const DiffCell& cell) {
  auto text = cell.name;
  if (cell.num_tensors > 0) text += "\n" + describe_difference(cell.difference);
  const auto experts = format_experts(cell);
  if (!experts.empty()) text += "\n" + experts;
  if (cell.worst_expert && cell.num_changed > 0) {
    text += fmt::format(": {} of its elements, relative difference {}",
                        format_share(cell.worst->difference.counts.changed_share()),
                        format_number(cell.worst->difference.relative_difference()));
  }
  constexpr std::size_t kMaxLines = 8;
  for (std::size_t i = 0; i < cell.unpaired.size() && i < kMaxLines; ++i)
    text += fmt::format("\n{}: {}", cell.unpaired[i]->tensor, describe(*cell.unpaired[i]));
  if (cell.unpaired.size() > kMaxLines)
    text += fmt::format("\nand {} more", cell.unpaired.size() - kMaxLines);
  return text;
}

bool has_nonfinite(const ElementDifference& difference) {
  return !format_nonfinite(difference.counts).empty();
}

std::string rectangle(
    double x, double y, double height, std::string_view classes, const std::string& title) {
  return fmt::format(
      "<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" rx=\"2\" "
      "class=\"{}\"><title>{}</title></rect>\n",
      x, y, kCellWidth, height, classes, escape_xml(title));
}

// The number itself, where there is room for it.
std::string number_in(double x,
                      double y,
                      double height,
                      const ElementDifference& difference,
                      const HeatScale& scale) {
  if (difference.counts.different == 0 || height < 18) return {};
  const auto value = scale.value(difference);
  return fmt::format("<text class=\"number {}\" x=\"{}\" y=\"{}\">{}</text>\n",
                     value > scale.steps[3] ? "high" : "low", x + kCellWidth * 0.5,
                     y + height * 0.5 + 3.5, escape_xml(scale.text(value)));
}

std::string cell_classes(const DiffCell& cell, const HeatScale& scale) {
  if (!cell.unpaired.empty()) return "unpaired";
  return step_class(cell.difference, scale) + (has_nonfinite(cell.difference) ? " nonfinite" : "");
}

// Any cell of the table, the ones outside of layers too.
template <typename Test>
bool any_cell(const DiffTable& table, Test&& test) {
  return std::ranges::any_of(table.outside.cells, test) ||
         std::ranges::any_of(table.layers, [&](const DiffRow& row) {
           return std::ranges::any_of(row.cells, test);
         });
}

}  // namespace

const HeatScale& changed_share_scale() {
  static const HeatScale scale{
      .id = "share",
      .title = "Share of changed elements",
      .value = [](const ElementDifference& one) { return one.counts.changed_share(); },
      .steps = {1e-4, 1e-3, 0.01, 0.1, 0.5, 0.9},
      .labels = {"to 0.01%", "0.1%", "1%", "10%", "50%", "90%", "100%"},
      .text =
          [](double share) {
            return share < 1e-4   ? std::string("<0.01%")
                   : share > 0.99 ? format_share(share)
                                  : fmt::format("{:.2g}%", share * 100);
          }};
  return scale;
}

const HeatScale& relative_difference_scale() {
  static const HeatScale scale{
      .id = "relative",
      .title = "Relative difference",
      .value = [](const ElementDifference& one) { return one.relative_difference(); },
      .steps = {1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.1},
      .labels = {"to 1e-6", "1e-5", "1e-4", "0.001", "0.01", "0.1", "more"},
      .text =
          [](double value) {
            if (value >= 1e-3) return fmt::format("{:.2g}", value);
            auto text = fmt::format("{:.1e}", value);  // "1.2e-04"
            if (const auto zero = text.find("e-0"); zero != std::string::npos)
              text.erase(zero + 2, 1);
            return text;
          }};
  return scale;
}

std::string step_class(const ElementDifference& difference, const HeatScale& scale) {
  if (difference.counts.different == 0) return "s0";
  const auto value = scale.value(difference);
  const auto* const step = std::ranges::lower_bound(scale.steps, value);
  return fmt::format("s{}", step - scale.steps.begin() + 1);
}

std::string heat_map_svg(const DiffTable& table, const HeatScale& scale) {
  std::size_t longest = std::string_view("whole layer").size();
  for (const auto& column : table.columns) longest = std::max(longest, column.size());
  const auto slant = static_cast<double>(longest) * kCharWidth * kSlope;
  const int cell_height = table.layers.size() > 48 ? 13 : 20;
  const double left = 44;
  const double top = slant + 14;
  const auto num_columns = static_cast<double>(table.columns.size());
  const auto column_x = [&](std::size_t column) {
    return left + static_cast<double>(column) * (kCellWidth + kGap);
  };
  const double total_x = left + num_columns * (kCellWidth + kGap) + kTotalGap;
  const double width = total_x + kCellWidth + slant;
  const double height = top + static_cast<double>(table.layers.size()) * (cell_height + kGap) + 4;

  auto svg = fmt::format(
      "<svg class=\"heat\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} {1:.0f}\" "
      "role=\"img\" aria-label=\"{2} by layer and tensor\">\n",
      width, height, scale.title);
  const auto label = [&](double x, std::string_view text) {
    svg += fmt::format("<text transform=\"translate({:.0f},{:.0f}) rotate(-45)\">{}</text>\n",
                       x + kCellWidth * 0.5, top - 8, escape_xml(text));
  };
  std::map<std::string_view, std::size_t> index;
  for (std::size_t i = 0; i < table.columns.size(); ++i) {
    index.emplace(table.columns[i], i);
    label(column_x(i), table.columns[i]);
  }
  label(total_x, "whole layer");
  double y = top;
  for (const auto& row : table.layers) {
    svg += fmt::format("<text class=\"layer\" x=\"{}\" y=\"{}\">{}</text>\n", left - 8,
                       y + cell_height * 0.5 + 4, *row.layer);
    for (const auto& cell : row.cells) {
      const auto x = column_x(index.at(cell.column));
      svg += rectangle(x, y, cell_height, cell_classes(cell, scale), describe_cell(cell));
      if (cell.unpaired.empty()) svg += number_in(x, y, cell_height, cell.difference, scale);
    }
    if (row.num_tensors > 0) {
      svg += rectangle(
          total_x, y, cell_height,
          step_class(row.difference, scale) + (has_nonfinite(row.difference) ? " nonfinite" : ""),
          fmt::format("layer {}: {} of {} tensors changed\n{}", *row.layer, row.num_changed,
                      row.num_tensors, describe_difference(row.difference)));
      svg += number_in(total_x, y, cell_height, row.difference, scale);
    }
    y += cell_height + kGap;
  }
  return svg + "</svg>\n";
}

std::string expert_map_svg(const DiffTable& table, const HeatScale& scale) {
  std::size_t num_experts = 0;
  std::size_t num_rows = 0;
  for (const auto& row : table.layers) {
    num_experts = std::max(num_experts, row.experts.size());
    num_rows += row.experts.empty() ? 0 : 1;
  }
  if (num_experts == 0) return {};
  const double step = std::clamp(1120.0 / static_cast<double>(num_experts), 5.0, 26.0);
  const double row_step = num_rows > 40 ? 11 : 15;
  const double left = 44;
  const double top = 20;
  const std::size_t every = num_experts <= 16 ? 1 : num_experts <= 64 ? 4 : 16;
  const auto width = left + static_cast<double>(num_experts) * step + 8;
  const auto height = top + static_cast<double>(num_rows) * row_step + 4;
  auto svg = fmt::format(
      "<svg class=\"experts\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} "
      "{1:.0f}\" role=\"img\" aria-label=\"{2} by layer and expert\">\n",
      width, height, scale.title);
  for (std::size_t i = 0; i < num_experts; i += every) {
    svg += fmt::format("<text class=\"axis\" x=\"{:.1f}\" y=\"{}\">{}</text>\n",
                       left + (static_cast<double>(i) + 0.5) * step, top - 6, i);
  }
  double y = top;
  for (const auto& row : table.layers) {
    if (row.experts.empty()) continue;
    svg += fmt::format("<text class=\"layer\" x=\"{}\" y=\"{}\">{}</text>\n", left - 8,
                       y + row_step * 0.5 + 3, *row.layer);
    for (std::size_t i = 0; i < row.experts.size(); ++i) {
      const auto& expert = row.experts[i];
      if (expert.counts.elements == 0) continue;
      svg += fmt::format(
          "<rect x=\"{:.1f}\" y=\"{}\" width=\"{:.1f}\" height=\"{}\" class=\"{}{}\">"
          "<title>layer {}, expert {}: {}, relative difference {}</title></rect>\n",
          left + static_cast<double>(i) * step, y, step - 1, row_step - 1,
          step_class(expert, scale), has_nonfinite(expert) ? " nonfinite" : "", *row.layer, i,
          expert.counts.different == 0
              ? "equal"
              : escape_xml(format_share(expert.counts.changed_share())) + " changed",
          format_number(expert.relative_difference()));
    }
    y += row_step;
  }
  return svg + "</svg>\n";
}

std::string outside_chips(const DiffTable& table, const HeatScale& scale) {
  std::string html;
  for (const auto& cell : table.outside.cells) {
    html += fmt::format(
        "<span class=\"chip\"><svg width=\"{0}\" height=\"20\" viewBox=\"0 0 {0} "
        "20\">{1}</svg>{2}</span>\n",
        kCellWidth, rectangle(0, 0, 20, cell_classes(cell, scale), describe_cell(cell)),
        escape_xml(cell.column));
  }
  return html;
}

std::string legend(const DiffTable& table, const HeatScale& scale) {
  std::string html = "<p class=\"legend\">";
  const auto add = [&](std::string_view classes, std::string_view text) {
    html += fmt::format(
        "<span class=\"key\"><svg width=\"26\" height=\"14\" viewBox=\"0 0 26 14\"><rect x=\"1\" "
        "y=\"1\" "
        "width=\"24\" height=\"12\" rx=\"2\" class=\"{}\"/></svg>{}</span>\n",
        classes, text);
  };
  add("s0", "equal");
  for (std::size_t i = 0; i < scale.labels.size(); ++i)
    add(fmt::format("s{}", i + 1), scale.labels[i]);
  if (any_cell(table, [](const DiffCell& cell) { return has_nonfinite(cell.difference); }))
    add("s0 nonfinite", "holds NaN or Inf");
  if (any_cell(table, [](const DiffCell& cell) { return !cell.unpaired.empty(); }))
    add("unpaired", "on one side only, or of another shape or dtype");
  return html + "</p>\n";
}

}  // namespace ferry::cli
