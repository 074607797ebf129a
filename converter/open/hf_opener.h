// Opens a checkpoint whose tensors are stored one by one under their Hugging Face names, whatever
// the format: each stored tensor is a tensor of the model.
#pragma once

#include "converter/open/checkpoint.h"
#include "converter/stored/stored.h"

namespace ferry::converter {

// `stored` has a configuration. Throws Error(kLayout) naming the tensor that is missing, surplus or
// of another shape. One that may be incomplete has only the tensors that are there.
Checkpoint open_huggingface(const Location& location, Stored stored, const OpenOptions& options);

}  // namespace ferry::converter
