// The GPUs that the kernels of a build run on.
#pragma once

#include <string_view>

#include "distckpt/base/error.h"

namespace ferry::models {

// The kernels are machine code of Hopper, compute capability 9.0, and PTX of it (nvcc_args in
// models/meson.build), which the driver compiles for later GPUs.
inline constexpr int kKernelsMajor = 9;

// The Error(kDevice) for the GPU `name`, which is an earlier one.
Error unfit_gpu(std::string_view name, int major, int minor);

}  // namespace ferry::models
