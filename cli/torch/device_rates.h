// The rates of a device, measured.
#pragma once

#include <c10/core/Device.h>

#include "distckpt/base/dtype.h"
#include "models/spec/roofline.h"

namespace ferry::cli {

// Takes about a second.
models::DeviceRates measure_rates(c10::Device device, distckpt::DType dtype);

}  // namespace ferry::cli
