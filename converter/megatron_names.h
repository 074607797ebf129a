// A checkpoint whose tensors are stored under Megatron-Core's keys, whatever the format. Which
// model it is of, its arguments or a Hugging Face configuration say.
#pragma once

#include "converter/checkpoint.h"
#include "converter/formats/stored.h"

namespace ferry::converter {

// Throws Error(kLayout | kNotFound | kCorrupt).
Checkpoint open_megatron_names(const Location& location, Stored stored);

}  // namespace ferry::converter
