#include "distckpt/error.h"
#include "trainer/kernels/adam_cuda.h"

namespace ferry::trainer {
namespace {

[[noreturn]] void absent() {
  throw Error(ErrorKind::kDevice, "this build has no CUDA", "configure with -Dcuda=enabled");
}

}  // namespace

void adam_update_cuda(const AdamTensors&, const AdamFactors&) {
  absent();
}
at::Tensor squared_sum_cuda(const at::Tensor&) {
  absent();
}

}  // namespace ferry::trainer
