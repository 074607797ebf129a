// The first of several places in a model, over all ranks: each rank names its first as a path that
// sorts by the order of the model and ends in a name: "00000003/00000017/decoder.layers.3.mlp".
#pragma once

#include <string>

#include "models/distributed/process_group.h"

namespace ferry::trainer {

// Keeps the place that comes first. Empty: none.
void keep_first(std::string& first, const std::string& place);

// The name of the first of all ranks' places, or nothing. Called by all ranks of the group.
std::string first_name(const models::ProcessGroup& all, std::string mine);

}  // namespace ferry::trainer
