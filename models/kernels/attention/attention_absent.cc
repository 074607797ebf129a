#include "models/device/no_cuda.h"
#include "models/kernels/attention/attention_cuda.h"
#include "models/kernels/attention/paged_attention.h"

namespace ferry::models {

// clang-format off
using Input = const at::Tensor&;

bool paged_attention_cuda_supports(at::Device, at::ScalarType, std::int64_t, std::int64_t) { return false; }
at::Tensor paged_attention_cuda(Input, const PagedKeys&, const AttentionOptions&) { no_cuda(); }
void store_in_slots_cuda(Input, Input, Input, Input, Input) { no_cuda(); }
at::Tensor attention_cuda(Input, Input, Input, const std::vector<AttentionSegment>&, const AttentionOptions&) { no_cuda(); }
// clang-format on

}  // namespace ferry::models
