#include "cli/report/run/timeline_svg.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <map>

#include "cli/report/chart.h"
#include "cli/report/html.h"

namespace ferry::cli {
namespace {

using trainer::Span;

constexpr double kTimelineWidth = 1200;
constexpr double kTimelineLeft = 64;
constexpr double kTimelineRight = 8;
constexpr double kTimelineTop = 26;
constexpr double kTimelineCharWidth = 6.4;
constexpr double kLabelHeight = 13;

constexpr std::size_t kMostBeside = 8;  // rows of a rank's programs; more lie over each other

struct Lane {
  int rank = 0;
  bool is_beside = false;  // of the programs that work beside the rank
  std::vector<const Span*> spans{};
  std::vector<std::size_t> depths{};  // of its spans
  std::size_t num_rows = 1;
};

// The look of a span's name, and how much of all ranks' time it takes.
struct Kind {
  bool is_frame = false;  // others lie in it, and it is about all of the step: it is drawn plain
  double seconds = 0;
  std::string classes{};
};
using Kinds = std::map<std::string, Kind>;

// A span lies below those that are open when it begins.
void add_span(Lane& lane, std::vector<const Span*>& open, const Span& span, Kinds& kinds) {
  std::erase_if(open, [&](const Span* one) { return one->end <= span.start; });
  for (const auto* one : open) kinds[one->name].is_frame |= one->end >= span.end;
  lane.spans.push_back(&span);
  lane.depths.push_back(open.size());
  open.push_back(&span);
  lane.num_rows = std::max(lane.num_rows, open.size());
}

// A span of a program takes the first row that is free; `ends`: of the rows.
void add_beside(Lane& lane, std::vector<double>& ends, const Span& span) {
  auto row = static_cast<std::size_t>(
      std::ranges::find_if(ends, [&](double end) { return end <= span.start; }) - ends.begin());
  if (row == ends.size() && ends.size() < kMostBeside) ends.push_back(0);
  row = std::min(row, ends.size() - 1);
  ends[row] = std::max(ends[row], span.end);
  lane.spans.push_back(&span);
  lane.depths.push_back(row);
  lane.num_rows = ends.size();
}

// Each rank has one, and one for the programs beside it, whose spans have names with a slash.
std::vector<Lane> lanes_of(const std::vector<Span>& spans, Kinds& kinds) {
  std::vector<Lane> lanes;
  for (std::size_t i = 0; i < spans.size();) {
    Lane own{.rank = spans[i].rank}, beside{.rank = spans[i].rank, .is_beside = true};
    std::vector<const Span*> open;
    std::vector<double> ends;
    for (; i < spans.size() && spans[i].rank == own.rank; ++i) {
      kinds[spans[i].name].seconds += spans[i].end - spans[i].start;
      if (spans[i].name.find('/') == std::string::npos)
        add_span(own, open, spans[i], kinds);
      else
        add_beside(beside, ends, spans[i]);
    }
    if (!own.spans.empty()) lanes.push_back(std::move(own));
    if (!beside.spans.empty()) lanes.push_back(std::move(beside));
  }
  return lanes;
}

// Names, the one that takes longest first: it gets the first colour. `step_seconds` are those of
// all ranks.
std::vector<std::string> give_colours(Kinds& kinds, double step_seconds) {
  std::vector<std::string> names;
  for (const auto& [name, kind] : kinds) names.push_back(name);
  std::ranges::stable_sort(names, std::greater(),
                           [&](const std::string& name) { return kinds.at(name).seconds; });
  std::size_t colour = 0;
  for (const auto& name : names) {
    auto& kind = kinds.at(name);
    kind.is_frame &= kind.seconds > 0.9 * step_seconds;
    kind.classes = kind.is_frame ? "frame" : colour_class(colour++);
  }
  return names;
}

std::string legend(const std::vector<std::string>& names,
                   const Kinds& kinds,
                   std::size_t num_ranks) {
  std::string html = "<p class=\"legend\"><span>Time of each, per rank:</span>\n";
  for (const auto& name : names) {
    const auto& kind = kinds.at(name);
    html +=
        fmt::format("<span class=\"key\"><i class=\"block {}\"></i>{} {}</span>\n", kind.classes,
                    escape_xml(name), short_time(kind.seconds / static_cast<double>(num_ranks)));
  }
  return html + "</p>\n";
}

}  // namespace

std::string timeline_svg(const std::vector<Span>& spans) {
  if (spans.empty()) return {};
  Kinds kinds;
  const auto lanes = lanes_of(spans, kinds);
  const auto begin = std::ranges::min(spans, {}, &Span::start).start;
  const auto end = std::max(std::ranges::max(spans, {}, &Span::end).end, begin + 1e-9);
  const auto num_ranks =
      static_cast<std::size_t>(std::ranges::count(lanes, false, &Lane::is_beside));
  const auto names = give_colours(kinds, (end - begin) * static_cast<double>(num_ranks));
  const auto x = [&](double time) {
    return kTimelineLeft +
           (time - begin) / (end - begin) * (kTimelineWidth - kTimelineLeft - kTimelineRight);
  };
  const double row = lanes.size() > 32 ? 8 : lanes.size() > 12 ? 13 : 20;
  const double gap = row * 0.4;
  double height = kTimelineTop;
  for (const auto& lane : lanes) height += static_cast<double>(lane.num_rows) * row + gap;

  auto svg = legend(names, kinds, std::max<std::size_t>(num_ranks, 1));
  svg += fmt::format(
      "<svg class=\"timeline\" viewBox=\"0 0 {0} {1:.0f}\" role=\"img\" aria-label=\"What each "
      "rank "
      "did in the step\">\n",
      kTimelineWidth, height);
  for (const auto tick : round_ticks(0, end - begin, 8)) {
    svg += fmt::format(
        "<line class=\"grid\" x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1}\" y2=\"{2:.0f}\"/>"
        "<text class=\"axis\" x=\"{0:.1f}\" y=\"{3}\">{4}</text>\n",
        x(begin + tick), kTimelineTop - 6, height, kTimelineTop - 11,
        tick == 0 ? "0" : short_time(tick));
  }
  double y = kTimelineTop;
  double labelled = 0;  // down to where there is a label
  for (const auto& lane : lanes) {
    if (y >= labelled) {
      labelled = y + kLabelHeight;
      svg += fmt::format("<text class=\"layer\" x=\"{}\" y=\"{:.1f}\">{}</text>\n",
                         kTimelineLeft - 8, y + row * 0.5 + 4,
                         lane.is_beside ? "programs" : fmt::format("rank {}", lane.rank));
    }
    for (std::size_t i = 0; i < lane.depths.size(); ++i) {
      const auto& span = *lane.spans[i];
      const auto left = x(span.start);
      const auto width = std::max(0.6, x(span.end) - left - 0.6);
      const auto top = y + static_cast<double>(lane.depths[i]) * row;
      svg += fmt::format(
          "<g class=\"span {}\"><title>{}\n{}, from {} on</title><rect x=\"{:.2f}\" y=\"{:.1f}\" "
          "width=\"{:.2f}\" height=\"{:.1f}\" rx=\"2\"/>",
          kinds.at(span.name).classes, escape_xml(span.name), short_time(span.end - span.start),
          short_time(span.start - begin), left, top, width, row - 1.5);
      if (row >= 18 && width > static_cast<double>(span.name.size()) * kTimelineCharWidth + 8) {
        svg += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\">{}</text>", left + 5,
                           top + row * 0.5 + 3.5, escape_xml(span.name));
      }
      svg += "</g>\n";
    }
    y += static_cast<double>(lane.num_rows) * row + gap;
  }
  return svg + "</svg>\n";
}

}  // namespace ferry::cli
