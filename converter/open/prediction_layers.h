// Prediction layers that a source names and lacks, or has and is to be rid of.
#pragma once

#include <optional>
#include <string_view>

#include "converter/open/checkpoint.h"
#include "converter/stored/stored.h"

namespace ferry::converter {

std::optional<PredictionLayers> prediction_layers(
    std::string_view name);  // "keep", "drop", "error"

// kError throws Error(kLayout) where configuration or arguments name prediction layers and no
// tensor of one is stored. kDrop takes their tensors and objects out, and out of the configuration;
// Throws Error(kUsage) where there is nothing of them, or where only the model tells which tensors
// there are.
void apply_prediction_policy(PredictionLayers policy, const Location& location, Stored& stored);

}  // namespace ferry::converter
