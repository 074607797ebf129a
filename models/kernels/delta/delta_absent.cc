#include "models/device/no_cuda.h"
#include "models/kernels/delta/delta_cuda.h"

namespace ferry::models {

bool delta_cuda_supports(const at::Tensor&, std::int64_t, std::int64_t) {
  return false;
}
bool delta_cuda_supports(std::int64_t, std::int64_t, std::int64_t) {
  return false;
}
void delta_step_cuda(const DeltaCore&,
                     const at::Tensor&,
                     const at::Tensor&,
                     const at::Tensor&,
                     const at::Tensor&,
                     const at::Tensor&) {
  no_cuda();
}
void delta_walk_cuda(const DeltaCore&,
                     std::span<const DeltaSpan>,
                     const at::Tensor&,
                     const at::Tensor&,
                     const at::Tensor&) {
  no_cuda();
}
at::Tensor packed_gated_delta_rule(const DeltaRows&, std::span<const std::int64_t>) {
  no_cuda();
}

}  // namespace ferry::models
