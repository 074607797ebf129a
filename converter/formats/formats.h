// The formats that are read, a function each.
#pragma once

#include "converter/checkpoint.h"
#include "converter/formats/stored.h"
#include "converter/locate.h"

namespace ferry::converter {

Stored read_huggingface(const Location& location);
Stored read_torch_dist(const Location& location, const OpenOptions& options);

}  // namespace ferry::converter
