// Reports of deltas, for people and as JSON.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "converter/delta/apply_delta.h"
#include "converter/delta/delta.h"
#include "converter/delta/make_delta.h"

namespace ferry::cli {

std::string make_delta_text(const converter::MakeDeltaReport& report);
nlohmann::ordered_json make_delta_json(const converter::MakeDeltaReport& report);

nlohmann::ordered_json verify_delta_json(const converter::VerifyDeltaReport& report);

// `tensors`: also each tensor that changed.
std::string delta_text(const converter::DeltaSummary& summary, bool tensors);
nlohmann::ordered_json delta_json(const converter::DeltaSummary& summary);

}  // namespace ferry::cli
