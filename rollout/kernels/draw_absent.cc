#include "models/device/no_cuda.h"
#include "rollout/kernels/draw.h"

namespace ferry::rollout {

void draw_on_gpu(const at::Tensor&, std::int64_t, const Draws&, const DrawnRows&) {
  models::no_cuda();
}

}  // namespace ferry::rollout
