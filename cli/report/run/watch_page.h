// The page of `ferry watch`: how a run goes, as lines of text for a terminal.
#pragma once

#include <string>
#include <vector>

#include "trainer/metrics/run_log.h"

namespace ferry::cli {

struct WatchScreen {
  int columns = 80;
  int rows = 24;
  bool unicode = true;  // else ASCII alone
};

// At most `rows` lines of at most `columns` characters: the folder; the step, the time
// left and the state; the course of each metric that the report draws first, its last value and
// its range; the parts of the last step by their seconds. Metrics that do not fit are counted.
// now: seconds since 1970.
std::vector<std::string> watch_page(const trainer::RunLog& run,
                                    double now,
                                    const WatchScreen& screen);

// A character for the mean of each part of the values, as many as there are values, but at most
// `columns`: from the least, the lowest, to the greatest. A part without a finite value is a blank.
std::string sparkline(const std::vector<double>& values, int columns, bool unicode);

}  // namespace ferry::cli
