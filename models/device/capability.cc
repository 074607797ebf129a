#include "models/device/capability.h"

#include <fmt/format.h>

namespace ferry::models {

Error unfit_gpu(std::string_view name, int major, int minor) {
  return {ErrorKind::kDevice,
          fmt::format(
              "the GPU is an {} of compute capability {}.{}, and the kernels need {}.0 or later",
              name, major, minor, kKernelsMajor),
          "run on an H100, H200, GH200 or a later one, or on the host: --device cpu, or "
          "trainer.device=cpu"};
}

}  // namespace ferry::models
