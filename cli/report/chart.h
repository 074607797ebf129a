// Curves over the steps of a run, or its seconds, as inline SVG, or as a file. Colours are classes
// of the page's style sheet; what is under the pointer is told by titles, without a script.
#pragma once

#include <string>
#include <vector>

namespace ferry::cli {

struct Series {
  std::string name{};            // in the legend, where there are several
  std::vector<double> steps{};   // ascending places on the axis
  std::vector<double> values{};  // one a step; what is not finite is a gap
  std::string colour{};          // colour_class(); "": by its place among those that are drawn
};

struct ChartOptions {
  std::string title{};
  std::string unit{};  // "GiB"
  std::string axis = "step";
  bool logarithmic = false;  // of positive values only
  bool smooth = false;  // besides the values of a noisy curve, the mean of each one's neighbours
  bool from_zero = false;
  bool compares = false;  // runs: each is named, and tells its last value where it has none
};

// The same curves over another axis.
struct OtherAxis {
  std::string axis{};  // "minute"
  std::vector<Series> series{};
};

// A figure with title, last value and axes; "" where there is nothing to draw. With another axis it
// has two pictures, of the classes over-steps and over-time, of which the page shows one.
std::string line_chart(const ChartOptions& options,
                       const std::vector<Series>& series,
                       const OtherAxis& other = {});

// The same as a picture of its own, an SVG file with the names of the axes and a legend; "" where
// there is nothing to draw.
std::string chart_file(const ChartOptions& options, const std::vector<Series>& series);

// About `count` round numbers in [low, high]: steps of 1, 2 or 5 times a power of ten.
std::vector<double> round_ticks(double low, double high, int count);

// "0.25", "12.5k", "3.2M", "1e-5".
std::string short_number(double value);

std::string short_time(double seconds);  // "1.25 s", "62 ms", "3.1 µs"

// The class of a colour: "c0" to "c11", and again.
std::string colour_class(std::size_t index);

}  // namespace ferry::cli
