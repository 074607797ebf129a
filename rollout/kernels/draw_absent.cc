#include "distckpt/error.h"
#include "rollout/kernels/draw.h"

namespace ferry::rollout {

void draw_on_gpu(const at::Tensor&, std::int64_t, const Draws&, const DrawnRows&) {
  throw Error(ErrorKind::kDevice, "this build has no CUDA", "configure with -Dcuda=enabled");
}

}  // namespace ferry::rollout
