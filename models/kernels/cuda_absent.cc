#include "models/device/no_cuda.h"
#include "models/kernels/log_probs_cuda.h"
#include "models/kernels/rms_norm_cuda.h"
#include "models/kernels/rotary_cuda.h"
#include "models/kernels/strided_copy_cuda.h"
#include "models/kernels/swiglu_cuda.h"

namespace ferry::models {

bool rms_norm_cuda_supports(std::int64_t) {
  return false;
}
RmsNormResult rms_norm_cuda(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, double, NormRounding, bool) {
  no_cuda();
}
std::pair<at::Tensor, at::Tensor> rms_norm_backward_cuda(const at::Tensor&,
                                                         const at::Tensor&,
                                                         const at::Tensor&,
                                                         const at::Tensor&,
                                                         const at::Tensor&,
                                                         NormRounding) {
  no_cuda();
}
at::Tensor rotary_angles_cuda(const at::Tensor&, const at::Tensor&, double, at::ScalarType) {
  no_cuda();
}
at::Tensor rotary_cuda(const at::Tensor&, const at::Tensor&, const at::Tensor&, bool) {
  no_cuda();
}
void rotary_backward_cuda(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, bool, at::Tensor&) {
  no_cuda();
}
QueryAndKey rotary_split_cuda(const at::Tensor&, const at::Tensor&, const at::Tensor&) {
  no_cuda();
}
void rotary_split_backward_cuda(const QueryAndKey&,
                                const at::Tensor&,
                                const at::Tensor&,
                                at::Tensor&) {
  no_cuda();
}
bool norm_rotary_cuda_supports(const at::Tensor&, const at::Tensor&) {
  return false;
}
QueryAndKey norm_rotary_cuda(const at::Tensor&,
                             const HeadNorms&,
                             const at::Tensor&,
                             const at::Tensor&) {
  no_cuda();
}
void strided_copy_cuda(const at::Tensor&, const at::Tensor&, const at::Tensor&, std::byte*) {
  no_cuda();
}
at::Tensor swiglu_cuda(const at::Tensor&) {
  no_cuda();
}
at::Tensor swiglu_backward_cuda(const at::Tensor&, const at::Tensor&) {
  no_cuda();
}
at::Tensor add_expert_biases_cuda(const at::Tensor&, const ExpertBiases&) {
  no_cuda();
}
at::Tensor quick_geglu_cuda(const at::Tensor&, const ExpertBiases&, const QuickGeglu&) {
  no_cuda();
}
at::Tensor quick_geglu_backward_cuda(const at::Tensor&,
                                     const at::Tensor&,
                                     const ExpertBiases&,
                                     const QuickGeglu&) {
  no_cuda();
}
at::Tensor sum_expert_rows_cuda(const at::Tensor&, const at::Tensor&) {
  no_cuda();
}
ScoredRows score_rows_cuda(const at::Tensor&, const at::Tensor&, VocabularyRange, double) {
  no_cuda();
}
void logits_to_gradient_cuda(at::Tensor&,
                             const at::Tensor&,
                             const at::Tensor&,
                             const at::Tensor&,
                             const at::Tensor&,
                             VocabularyRange,
                             double) {
  no_cuda();
}

}  // namespace ferry::models
