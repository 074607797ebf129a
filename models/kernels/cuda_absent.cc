#include "models/device/no_cuda.h"
#include "models/kernels/log_probs_cuda.h"
#include "models/kernels/rms_norm_cuda.h"
#include "models/kernels/rotary_cuda.h"
#include "models/kernels/strided_copy_cuda.h"
#include "models/kernels/swiglu_cuda.h"

namespace ferry::models {

// clang-format off
using Input = const at::Tensor&;

bool rms_norm_cuda_supports(std::int64_t) { return false; }
RmsNormResult rms_norm_cuda(Input, Input, Input, double, NormRounding, bool) { no_cuda(); }
std::pair<at::Tensor, at::Tensor> rms_norm_backward_cuda(Input, Input, Input, Input, Input, NormRounding) { no_cuda(); }
at::Tensor rotary_angles_cuda(Input, Input, double, at::ScalarType) { no_cuda(); }
at::Tensor rotary_cuda(Input, Input, Input, bool) { no_cuda(); }
void rotary_backward_cuda(Input, Input, Input, bool, at::Tensor&) { no_cuda(); }
QueryAndKey rotary_split_cuda(Input, Input, Input) { no_cuda(); }
void rotary_split_backward_cuda(const QueryAndKey&, Input, Input, at::Tensor&) { no_cuda(); }
bool norm_rotary_cuda_supports(Input, Input) { return false; }
QueryAndKey norm_rotary_cuda(Input, const HeadNorms&, Input, Input) { no_cuda(); }
void strided_copy_cuda(Input, Input, Input, std::byte*) { no_cuda(); }
at::Tensor swiglu_cuda(Input) { no_cuda(); }
at::Tensor swiglu_backward_cuda(Input, Input) { no_cuda(); }
at::Tensor add_expert_biases_cuda(Input, const ExpertBiases&) { no_cuda(); }
at::Tensor quick_geglu_cuda(Input, const ExpertBiases&, const QuickGeglu&) { no_cuda(); }
at::Tensor quick_geglu_backward_cuda(Input, Input, const ExpertBiases&, const QuickGeglu&) { no_cuda(); }
at::Tensor sum_expert_rows_cuda(Input, Input) { no_cuda(); }
ScoredRows score_rows_cuda(Input, Input, VocabularyRange, double) { no_cuda(); }
void logits_to_gradient_cuda(at::Tensor&, Input, Input, Input, Input, VocabularyRange, double) { no_cuda(); }
// clang-format on

}  // namespace ferry::models
