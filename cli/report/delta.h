// Reports of deltas, for people; json.h has those for programs.
#pragma once

#include <string>

#include "converter/delta/delta.h"
#include "converter/delta/make_delta.h"

namespace ferry::cli {

std::string make_delta_text(const converter::MakeDeltaReport& report);

// `tensors`: also each tensor that changed.
std::string delta_text(const converter::DeltaSummary& summary, bool tensors);

}  // namespace ferry::cli
