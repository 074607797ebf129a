// A checkpoint whose tensors are stored under Megatron-Core's keys, whatever the format. Which
// model it is of, its arguments or a Hugging Face configuration say.
#pragma once

#include "converter/open/checkpoint.h"
#include "converter/stored/stored.h"

namespace ferry::converter {

// What tensors say of a model and its arguments do not: its head, its router, and so its family.
void read_from_tensors(const TensorOutline& outline, models::TransformerConfig& config);

// Throws Error(kLayout | kNotFound | kCorrupt).
Checkpoint open_megatron_names(const Location& location, Stored stored);

}  // namespace ferry::converter
