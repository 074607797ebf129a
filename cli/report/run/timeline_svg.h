// A step of a run as inline SVG: a lane for each rank, spans within spans below them, and a
// legend.
#pragma once

#include <string>
#include <vector>

#include "trainer/metrics/timeline.h"

namespace ferry::cli {

// Spans of one step, sorted by rank, start, and the longer first. "" where there are none.
std::string timeline_svg(const std::vector<trainer::Span>& spans);

}  // namespace ferry::cli
