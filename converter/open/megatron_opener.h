// Opens a checkpoint whose tensors are stored under Megatron-Core's keys, whatever the format. Its
// arguments or a Hugging Face configuration say which model it is of.
#pragma once

#include "converter/open/checkpoint.h"
#include "converter/stored/stored.h"

namespace ferry::converter {

// Fills in the parts of a model that only its tensors show, not its arguments: its head, its
// router, and so its family.
void read_from_tensors(const TensorOutline& outline, models::TransformerConfig& config);

// Throws Error(kLayout | kNotFound | kCorrupt).
Checkpoint open_megatron(const Location& location, Stored stored);

}  // namespace ferry::converter
