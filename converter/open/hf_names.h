// A checkpoint whose tensors are stored one by one under their Hugging Face names, whatever the
// format: each is itself.
#pragma once

#include <string>

#include "converter/open/checkpoint.h"
#include "converter/stored/stored.h"

namespace ferry::converter {

// `stored` has a configuration. Throws Error(kLayout) naming the tensor that is missing, surplus or
// of another shape.
Checkpoint open_hf_names(const Location& location, Stored stored, bool keep_fp8);

// The families' tensors are all weights. Throws Error(kLayout).
void require_floats(const std::string& name, distckpt::DType dtype);

// What was dequantised is written anew, with a configuration that says so. A Megatron checkpoint is
// not quantised, though the configuration named for it may be.
void leave_quantization(HfForm& hf);

}  // namespace ferry::converter
