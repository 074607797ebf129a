// A heat map of layers (rows) by projections (columns) as inline SVG. Colours are classes of the
// page's style sheet, so that light and dark mode are its business.
#pragma once

#include <array>
#include <string>
#include <string_view>

#include "converter/diff.h"

namespace ferry::cli {

// The colours of a cell's number, in seven steps; equal cells have a colour of their own.
struct HeatScale {
  std::string_view id{};     // of the HTML elements
  std::string_view title{};  // "Share of changed elements"
  double (*value)(const distckpt::ElementDifference&) = nullptr;
  std::array<double, 6> steps{};  // a value up to steps[i], included, is of step i + 1
  std::array<std::string_view, 7> labels{};
  std::string (*text)(double value) = nullptr;  // short enough for a cell
};

const HeatScale& changed_share_scale();
const HeatScale& relative_difference_scale();

std::string heat_map_svg(const converter::DiffTable& table, const HeatScale& scale);
std::string expert_map_svg(const converter::DiffTable& table,
                           const HeatScale& scale);  // layers by experts; "" if there are none
std::string outside_chips(const converter::DiffTable& table, const HeatScale& scale);
std::string legend(const converter::DiffTable& table, const HeatScale& scale);

// The class of a cell's colour: "s0" for equal to "s7".
std::string step_class(const distckpt::ElementDifference& difference, const HeatScale& scale);

}  // namespace ferry::cli
