#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "cli/report/diff.h"
#include "cli/report/text.h"
#include "distckpt/base/printable.h"

namespace ferry::cli {
namespace {

using converter::DiffCell;
using converter::DiffRow;
using distckpt::ElementDifference;

// The first column is aligned left, the last too if it is text; the others right.
using TableLine = std::vector<std::string>;

std::string draw_table(const std::vector<TableLine>& lines, bool last_is_text) {
  std::vector<std::size_t> widths(lines.front().size(), 0);
  for (const auto& line : lines) {
    for (std::size_t i = 0; i < line.size(); ++i) widths[i] = std::max(widths[i], line[i].size());
  }
  std::string text = "\n";
  for (const auto& line : lines) {
    std::string row = fmt::format("{:<{}}", line.front(), widths.front());
    for (std::size_t i = 1; i < line.size(); ++i) {
      const bool left = last_is_text && i + 1 == line.size();
      row += left ? "  " + line[i] : fmt::format("  {:>{}}", line[i], widths[i]);
    }
    row.erase(row.find_last_not_of(' ') + 1);
    text += row + "\n";
  }
  return text;
}

std::string layer_table(const converter::DiffTable& table) {
  std::vector<TableLine> lines{
      {"layer", "tensors", "changed", "relative", "largest", "ulps", "differs most"}};
  const auto add = [&](const DiffRow& row) {
    if (row.num_tensors == 0) return;
    const auto most = std::ranges::max_element(row.cells, [](const DiffCell& a, const DiffCell& b) {
      return converter::is_worse(b.difference, a.difference);
    });
    const auto& counts = row.difference.counts;
    lines.push_back({row.layer ? fmt::format("{}", *row.layer) : "outside",
                     fmt::format("{} of {}", row.num_changed, row.num_tensors),
                     format_share(counts.changed_share()),
                     format_number(row.difference.relative_difference()), format_largest(counts),
                     format_ulps(counts), row.num_changed == 0 ? "" : most->column});
  };
  add(table.outside);
  std::ranges::for_each(table.layers, add);
  return draw_table(lines, true);
}

std::string tensor_table(const converter::DiffTable& table, DiffOrder order) {
  std::vector<const DiffCell*> cells;
  const auto collect = [&](const DiffRow& row) {
    for (const auto& cell : row.cells) {
      if (cell.num_changed > 0) cells.push_back(&cell);
    }
  };
  collect(table.outside);
  std::ranges::for_each(table.layers, collect);
  if (cells.empty()) return {};
  if (order == DiffOrder::kChanged) {
    std::ranges::stable_sort(cells, [](const DiffCell* a, const DiffCell* b) {
      return converter::is_worse(a->difference, b->difference);
    });
  }
  std::vector<TableLine> lines{
      {"tensor", "changed", "|A|", "|B|", "|A-B|", "relative", "largest", "ulps", ""}};
  for (const auto* cell : cells) {
    const auto& difference = cell->difference;
    auto remarks = format_experts(*cell);
    const auto nonfinite = format_nonfinite(difference.counts);
    if (!remarks.empty() && !nonfinite.empty()) remarks += "; ";
    remarks += nonfinite;
    lines.push_back({printable(cell->name), format_share(difference.counts.changed_share()),
                     format_number(difference.left_norm()), format_number(difference.right_norm()),
                     format_number(difference.difference_norm()),
                     format_number(difference.relative_difference()),
                     format_largest(difference.counts), format_ulps(difference.counts),
                     std::move(remarks)});
  }
  return draw_table(lines, true);
}

std::string histogram(const ElementDifference& total) {
  constexpr double kWidth = 40;
  const auto& counts = total.counts;
  std::vector<TableLine> lines{{"ulps", "elements", "share", ""}};
  for (std::size_t i = 0; i < num_buckets(counts); ++i) {
    const auto share = static_cast<double>(counts.ulps[i]) / static_cast<double>(counts.elements);
    lines.push_back({format_bucket(i), format_count(counts.ulps[i]),
                     counts.ulps[i] == 0 ? "" : format_share(share),
                     std::string(static_cast<std::size_t>(std::ceil(share * kWidth)), '#')});
  }
  return draw_table(lines, true);
}

}  // namespace

std::string format_share(double share) {
  if (share == 0) return "equal";
  if (share == 1) return "100%";
  // Not rounded up to the whole.
  return share > 0.9994 ? ">99.9%" : fmt::format("{:.3g}%", share * 100);
}

std::string format_number(double value) {
  return fmt::format("{:.4g}", value);
}

std::string format_largest(const distckpt::ElementCounts& counts) {
  return counts.max_difference ? format_number(*counts.max_difference) : "";
}

std::string format_ulps(const distckpt::ElementCounts& counts) {
  return counts.max_ulps ? fmt::format("{}", *counts.max_ulps) : "";
}

std::string format_nonfinite(const distckpt::ElementCounts& counts) {
  std::string text;
  const auto add = [&](std::string_view side, std::int64_t nans, std::int64_t infinities) {
    if (nans + infinities == 0) return;
    text += fmt::format("{}{}: ", text.empty() ? "" : "; ", side);
    if (nans > 0) text += fmt::format("{} NaN", format_count(nans));
    if (nans > 0 && infinities > 0) text += ", ";
    if (infinities > 0) text += fmt::format("{} Inf", format_count(infinities));
  };
  add("A", counts.left_nans, counts.left_infinities);
  add("B", counts.right_nans, counts.right_infinities);
  return text;
}

std::string format_experts(const DiffCell& cell) {
  if (!cell.worst_expert) return {};
  if (cell.num_changed == 0) return fmt::format("{} experts", cell.num_tensors);
  return fmt::format("{} of {} experts changed, most {}", cell.num_changed, cell.num_tensors,
                     *cell.worst_expert);
}

std::size_t num_buckets(const distckpt::ElementCounts& counts) {
  const auto last = std::ranges::find_if(counts.ulps.rbegin(), counts.ulps.rend(),
                                         [](std::int64_t count) { return count > 0; });
  return static_cast<std::size_t>(counts.ulps.rend() - last);
}

std::string diff_text(const converter::DiffReport& report, DiffOrder order) {
  constexpr std::size_t kMaxLines = 40;
  std::string text;
  text += fmt::format("A        {} ({}, {})\n", printable(report.left.string()),
                      describe(report.left_format), report.family);
  text += fmt::format("B        {} ({})\n", printable(report.right.string()),
                      describe(report.right_format));
  for (std::size_t i = 0; i < report.unpaired.size() && i < kMaxLines; ++i) {
    text += fmt::format("differs  {}: {}\n", printable(report.unpaired[i].tensor),
                        describe(report.unpaired[i]));
  }
  if (report.unpaired.size() > kMaxLines) {
    text += fmt::format("differs  {} more tensors; --json lists them all\n",
                        report.unpaired.size() - kMaxLines);
  }
  for (const auto& note : report.notes) text += fmt::format("note     {}\n", printable(note));
  const auto& counts = report.total.counts;
  text += fmt::format("compared {} tensors, {} elements, {} in {}\n", report.tensors.size(),
                      format_count(counts.elements), format_bytes(report.bytes),
                      format_seconds(report.seconds));
  if (report.num_changed == 0) {
    if (report.identical()) return text + "equal: no element differs\n";
    return text + (report.tensors.empty()
                       ? "no tensor could be compared: none is in both in one dtype and shape\n"
                       : "no element of the tensors that both hold differs\n");
  }
  text += fmt::format(
      "changed  {} tensors, {} elements ({}); relative difference {}{}{}\n", report.num_changed,
      format_count(counts.different), format_share(counts.changed_share()),
      format_number(report.total.relative_difference()),
      counts.max_difference ? fmt::format(", largest {}", format_largest(counts)) : "",
      counts.max_ulps ? fmt::format(", {} ulps", *counts.max_ulps) : "");
  const auto nonfinite = format_nonfinite(counts);
  if (!nonfinite.empty()) text += fmt::format("NaN/Inf  {}; in no norm\n", nonfinite);
  const auto table = tabulate(report);
  return text + layer_table(table) + tensor_table(table, order) + histogram(report.total);
}

}  // namespace ferry::cli
