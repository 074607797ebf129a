#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "cli/report/diff.h"
#include "cli/report/heat_map.h"
#include "cli/report/html.h"
#include "cli/report/text.h"

namespace ferry::cli {
namespace {

using converter::DiffCell;
using converter::DiffReport;
using converter::DiffRow;
using converter::DiffTable;

std::string header(const DiffReport& report) {
  std::string html = "<h1>How two checkpoints differ</h1>\n<table class=\"sides\">\n";
  const auto side = [&](std::string_view letter, const std::filesystem::path& path,
                        converter::Format format) {
    html += fmt::format("<tr><th>{}</th><td><code>{}</code></td><td class=\"dim\">{}</td></tr>\n",
                        letter, escape_xml(path.string()), describe(format));
  };
  side("A", report.left, report.left_format);
  side("B", report.right, report.right_format);
  html += "</table>\n<div class=\"tiles\">\n";
  const auto& counts = report.total.counts;
  const auto share = format_share(counts.changed_share());
  html += tile(counts.different == 0 ? "none" : share,
               fmt::format("of {} elements changed", format_count(counts.elements)));
  html +=
      tile(fmt::format("{} of {}", report.num_changed, report.tensors.size()), "tensors changed");
  html += tile(format_number(report.total.relative_difference()), "relative difference");
  if (counts.max_difference) html += tile(format_largest(counts), "largest difference");
  if (counts.max_ulps) html += tile(format_ulps(counts), "largest distance in ulps");
  if (!report.unpaired.empty())
    html += tile(format_count(static_cast<std::int64_t>(report.unpaired.size())),
                 "tensors could not be compared");
  html += "</div>\n";
  const auto nonfinite = format_nonfinite(counts);
  if (!nonfinite.empty()) {
    html += fmt::format("<p>Not finite, and so in no norm: {}.</p>\n", escape_xml(nonfinite));
  }
  for (const auto& note : report.notes)
    html += fmt::format("<p class=\"dim\">Note: {}</p>\n", escape_xml(note));
  return html;
}

std::string maps(const DiffTable& table) {
  const std::array scales{&changed_share_scale(), &relative_difference_scale()};
  std::string html = "<h2>Layers and their tensors</h2>\n<div class=\"picker\">\n";
  for (const auto* scale : scales) {
    html += fmt::format("<input type=\"radio\" name=\"pick\" id=\"pick-{}\"{}/>\n", scale->id,
                        scale == scales.front() ? " checked=\"checked\"" : "");
  }
  for (const auto* scale : scales)
    html += fmt::format("<label for=\"pick-{}\">{}</label>\n", scale->id, scale->title);
  for (const auto* scale : scales) {
    html += fmt::format("<div class=\"panel\" id=\"{}\">\n{}", scale->id, legend(table, *scale));
    if (!table.layers.empty()) html += heat_map_svg(table, *scale);
    if (!table.outside.cells.empty()) {
      html += "<h3>Outside of layers</h3>\n<div class=\"chips\">\n" + outside_chips(table, *scale) +
              "</div>\n";
    }
    const auto experts = expert_map_svg(table, *scale);
    if (!experts.empty()) html += "<h3>Layers and their experts</h3>\n" + experts;
    html += "</div>\n";
  }
  return html +
         "</div>\n<p class=\"dim\">Point at a cell for its numbers. The relative difference is the "
         "L2 norm of A-B "
         "over that of A.</p>\n";
}

// "1,234" up to there, then "12.3k", "4.56M".
std::string short_count(std::int64_t count) {
  if (count < 10'000) return format_count(count);
  auto value = static_cast<double>(count);
  std::string_view unit;
  for (const std::string_view next : {"k", "M", "G", "T"}) {
    if (value < 999.5) break;
    value /= 1000;
    unit = next;
  }
  return fmt::format("{:.3g}{}", value, unit);
}

// "3-4", then "to 16", then "to 2^14", raised: there is room for little more.
std::string short_bucket(std::size_t bucket) {
  const auto last = distckpt::largest_ulps_of(bucket);
  if (last < 16) return format_bucket(bucket);
  if (last < 1000) return fmt::format("to {}", last);
  if (last >= std::uint64_t{1} << 62) return "more";
  return fmt::format("to 2<tspan class=\"power\" dy=\"-4\">{}</tspan>", bucket - 1);
}

// Heights are logarithms: a single element is seen beside a billion.
std::string histogram(const distckpt::ElementCounts& counts) {
  constexpr double kBarWidth = 40;
  constexpr double kStep = 54;
  constexpr double kLeft = 58;
  constexpr double kTop = 26;
  constexpr double kHeight = 180;
  const auto buckets = num_buckets(counts);
  const auto largest = *std::ranges::max_element(counts.ulps);
  const auto decades =
      std::max(1.0, std::ceil(std::log10(static_cast<double>(std::max<std::int64_t>(largest, 2)))));
  const auto height_of = [&](double count) {  // one element is half a decade high
    return kHeight * (std::log10(count) + 0.5) / (decades + 0.5);
  };
  const double width = kLeft + static_cast<double>(buckets) * kStep + 10;
  std::string html = fmt::format(
      "<h2>Distances in ulps</h2>\n<p class=\"dim\">Elements by how many representable values "
      "their two values lie "
      "apart; heights are logarithmic. 0 is equal.</p>\n<div style=\"overflow-x:auto\"><svg "
      "class=\"histogram\" "
      "width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} {1:.0f}\" role=\"img\" "
      "aria-label=\"Histogram of distances in ulps\">\n",
      width, kTop + kHeight + 30);
  const double bottom = kTop + kHeight;
  const int decades_per_line = decades > 6 ? 2 : 1;
  for (int decade = 0; decade <= static_cast<int>(decades); decade += decades_per_line) {
    const auto y = bottom - height_of(std::pow(10, decade));
    html += fmt::format(
        "<line class=\"grid\" x1=\"{}\" x2=\"{:.0f}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/>\n"
        "<text class=\"layer\" x=\"{}\" y=\"{:.1f}\">{}</text>\n",
        kLeft, width - 4, y, y, kLeft - 8, y + 4,
        short_count(static_cast<std::int64_t>(std::llround(std::pow(10, decade)))));
  }
  for (std::size_t i = 0; i < buckets; ++i) {
    const auto x = kLeft + 8 + static_cast<double>(i) * kStep;
    const auto middle = x + kBarWidth / 2;
    const auto count = counts.ulps[i];
    html += fmt::format("<text class=\"axis\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>\n", middle,
                        bottom + 18, short_bucket(i));
    if (count == 0) continue;
    const auto height = height_of(static_cast<double>(count));
    html += fmt::format(
        "<rect class=\"bar{}\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{}\" height=\"{:.1f}\" "
        "rx=\"2\"><title>{} ulps: {} elements ({})</title></rect>\n"
        "<text class=\"axis\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>\n",
        i == 0 ? " equal" : "", x, bottom - height, kBarWidth, height, format_bucket(i),
        format_count(count),
        format_share(static_cast<double>(count) / static_cast<double>(counts.elements)), middle,
        bottom - height - 5, short_count(count));
  }
  html += fmt::format(
      "<line class=\"grid\" x1=\"{0}\" x2=\"{1:.0f}\" y1=\"{2}\" y2=\"{2}\"/>\n</svg></div>\n",
      kLeft, width - 4, bottom);
  return html;
}

std::string number_cells(const distckpt::ElementDifference& difference) {
  const auto& counts = difference.counts;
  const bool equal = counts.different == 0;
  const auto unless_equal = [&](const std::string& text) { return equal ? std::string() : text; };
  return fmt::format(
      "<td><span class=\"swatch "
      "{}\"></span>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</"
      "td><td>{}</td>",
      step_class(difference, changed_share_scale()), format_share(counts.changed_share()),
      unless_equal(format_count(counts.different)), format_number(difference.left_norm()),
      format_number(difference.right_norm()),
      unless_equal(format_number(difference.difference_norm())),
      unless_equal(format_number(difference.relative_difference())), format_largest(counts),
      format_ulps(counts));
}

std::string number_table(const DiffTable& table) {
  std::string html =
      "<h2>In numbers</h2>\n<div class=\"scroll\"><table "
      "class=\"numbers\">\n<thead><tr><th>tensor</th><th>dtype</th>"
      "<th>elements</th><th>changed</th><th>elements</th><th>\u2016A\u2016</th><th>\u2016B\u2016</"
      "th>"
      "<th>\u2016A\u2212B\u2016</th><th>relative</th><th>largest</th><th>ulps</th><th></th></tr></"
      "thead>\n";
  const auto add_cell = [&](const DiffCell& cell) {
    for (const auto* tensor : cell.unpaired) {
      html += fmt::format("<tr><td><code>{}</code></td><td colspan=\"10\"></td><td>{}</td></tr>\n",
                          escape_xml(tensor->tensor), escape_xml(describe(*tensor)));
    }
    if (cell.num_tensors == 0) return;
    const auto experts = format_experts(cell);
    const auto nonfinite = format_nonfinite(cell.difference.counts);
    html +=
        fmt::format("<tr{}><td><code>{}</code></td><td>{}</td><td>{}</td>{}<td>{}{}{}</td></tr>\n",
                    cell.num_changed == 0 ? " class=\"same\"" : "", escape_xml(cell.name),
                    short_name(cell.worst->dtype), format_count(cell.difference.counts.elements),
                    number_cells(cell.difference), experts,
                    experts.empty() || nonfinite.empty() ? "" : "; ", nonfinite);
  };
  const auto add_row = [&](const DiffRow& row) {
    if (row.cells.empty()) return;
    html +=
        fmt::format("<tbody><tr class=\"layer\"><td>{}</td><td></td><td>{}</td>{}<td></td></tr>\n",
                    row.layer ? fmt::format("Layer {}", *row.layer) : "Outside of layers",
                    format_count(row.difference.counts.elements), number_cells(row.difference));
    std::ranges::for_each(row.cells, add_cell);
    html += "</tbody>\n";
  };
  add_row(table.outside);
  std::ranges::for_each(table.layers, add_row);
  return html + "</table></div>\n";
}

}  // namespace

std::string diff_html(const DiffReport& report) {
  const auto table = tabulate(report);
  auto html = header(report) + maps(table);
  if (report.num_changed > 0) html += histogram(report.total.counts);
  html += number_table(table);
  return html_page(fmt::format("{} and {}: how they differ", report.left.filename().string(),
                               report.right.filename().string()),
                   html);
}

}  // namespace ferry::cli
