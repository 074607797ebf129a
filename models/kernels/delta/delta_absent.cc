#include "models/device/no_cuda.h"
#include "models/kernels/delta/delta_cuda.h"

namespace ferry::models {

// clang-format off
using Input = const at::Tensor&;

bool delta_cuda_supports(Input, std::int64_t, std::int64_t) { return false; }
bool delta_cuda_supports(std::int64_t, std::int64_t, std::int64_t) { return false; }
void delta_step_cuda(const DeltaCore&, Input, Input, Input, Input, Input) { no_cuda(); }
void delta_walk_cuda(const DeltaCore&, std::span<const DeltaSpan>, Input, Input, Input) { no_cuda(); }
at::Tensor packed_gated_delta_rule(const DeltaRows&, std::span<const std::int64_t>) { no_cuda(); }
// clang-format on

}  // namespace ferry::models
