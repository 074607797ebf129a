#include "distckpt/error.h"
#include "rollout/kernels/step_copies.h"

namespace ferry::rollout {
namespace {

[[noreturn]] void absent() {
  throw Error(ErrorKind::kDevice, "this build has no CUDA", "configure with -Dcuda=enabled");
}

}  // namespace

void upload_step(
    const at::Tensor&, const at::Tensor&, std::int64_t, std::int64_t, const at::Tensor&) {
  absent();
}
void download_step(const DrawnNumbers&, const DrawnNumbers&) {
  absent();
}

}  // namespace ferry::rollout
