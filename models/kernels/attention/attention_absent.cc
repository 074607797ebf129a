#include "models/device/no_cuda.h"
#include "models/kernels/attention/attention_cuda.h"
#include "models/kernels/attention/paged_attention.h"

namespace ferry::models {

bool paged_attention_cuda_supports(at::Device, at::ScalarType, std::int64_t, std::int64_t) {
  return false;
}
at::Tensor paged_attention_cuda(const at::Tensor&, const PagedKeys&, const AttentionOptions&) {
  no_cuda();
}
void store_in_slots_cuda(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&) {
  no_cuda();
}
at::Tensor attention_cuda(const at::Tensor&,
                          const at::Tensor&,
                          const at::Tensor&,
                          const std::vector<AttentionSegment>&,
                          const AttentionOptions&) {
  no_cuda();
}

}  // namespace ferry::models
