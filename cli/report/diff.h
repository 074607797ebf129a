// The differences between two checkpoints, for people: as tables on a terminal, and as one HTML
// file with a heat map that needs nothing else.
#pragma once

#include <cstddef>
#include <string>

#include "converter/diff.h"

namespace ferry::cli {

enum class DiffOrder { kLayer, kChanged };

std::string diff_text(const converter::DiffReport& report, DiffOrder order);
std::string diff_html(const converter::DiffReport& report);  // also well-formed XML

// Numbers, as both show them.
std::string format_share(double share);         // "equal", "0.012%", "26%"
std::string format_number(double value);        // "0.01234", "1.2e-07"
std::string format_bucket(std::size_t bucket);  // of distances in ulps: "0", "1", "2", "3-4"
std::string format_largest(const distckpt::ElementCounts& counts);  // "0.0156", or ""
std::string format_ulps(const distckpt::ElementCounts& counts);     // "4", or ""
std::string format_nonfinite(
    const distckpt::ElementCounts& counts);  // "A: 2 NaN; B: 1 NaN, 1 Inf", or ""
std::string format_experts(
    const converter::DiffCell& cell);  // "3 of 64 experts changed, most 17", or ""
std::size_t num_buckets(const distckpt::ElementCounts& counts);  // up to the last that is not empty

}  // namespace ferry::cli
