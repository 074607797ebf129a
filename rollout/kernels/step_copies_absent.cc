#include "models/device/no_cuda.h"
#include "rollout/kernels/step_copies.h"

namespace ferry::rollout {
void upload_step(
    const at::Tensor&, const at::Tensor&, std::int64_t, std::int64_t, const at::Tensor&) {
  models::no_cuda();
}
void download_step(const DrawnNumbers&, const DrawnNumbers&) {
  models::no_cuda();
}

}  // namespace ferry::rollout
