#include "distckpt/error.h"
#include "models/kernels/attention_cuda.h"
#include "models/kernels/gemm.h"
#include "models/kernels/log_probs_cuda.h"
#include "models/kernels/paged_attention.h"
#include "models/kernels/rms_norm_cuda.h"
#include "models/kernels/rotary_cuda.h"
#include "models/kernels/strided_copy_cuda.h"
#include "models/kernels/swiglu_cuda.h"
#include "models/row_decoder.h"

namespace ferry::models {
namespace {

[[noreturn]] void absent() {
  throw Error(ErrorKind::kDevice, "this build has no CUDA", "configure with -Dcuda=enabled");
}

}  // namespace

at::Tensor gemm_nt(const at::Tensor&, const at::Tensor&, const at::Tensor&) {
  absent();
}
std::int64_t gemm_bucket(std::int64_t rows) {
  return rows;
}
std::vector<GemmChoice> gemm_choices() {
  return {};
}
std::vector<std::pair<std::string, std::string>> gemm_environment() {
  return {};
}
bool paged_attention_cuda_supports(at::Device, at::ScalarType, std::int64_t, std::int64_t) {
  return false;
}
at::Tensor paged_attention_cuda(const at::Tensor&, const PagedKeys&, const AttentionOptions&) {
  absent();
}
void store_in_slots_cuda(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&) {
  absent();
}
std::unique_ptr<RowDecoder> RowDecoder::make(const distckpt::TransformerConfig&,
                                             const ParallelState&,
                                             Alignment,
                                             const Parameters&) {
  return nullptr;
}
bool RowDecoder::takes(const DecodedRow&) const {
  return false;
}
ResidualStream RowDecoder::forward(const at::Tensor&,
                                   const RotaryAngles&,
                                   const DecodedRow&) const {
  absent();
}
bool rms_norm_cuda_supports(std::int64_t) {
  return false;
}
RmsNormResult rms_norm_cuda(const at::Tensor&, const at::Tensor&, const at::Tensor&, double) {
  absent();
}
std::pair<at::Tensor, at::Tensor> rms_norm_backward_cuda(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&) {
  absent();
}
at::Tensor rotary_angles_cuda(const at::Tensor&, const at::Tensor&, double, at::ScalarType) {
  absent();
}
at::Tensor rotary_cuda(const at::Tensor&, const at::Tensor&, const at::Tensor&, bool) {
  absent();
}
void rotary_backward_cuda(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, bool, at::Tensor&) {
  absent();
}
QueryAndKey rotary_split_cuda(const at::Tensor&, const at::Tensor&, const at::Tensor&) {
  absent();
}
void rotary_split_backward_cuda(const QueryAndKey&,
                                const at::Tensor&,
                                const at::Tensor&,
                                at::Tensor&) {
  absent();
}
void strided_copy_cuda(const at::Tensor&, const at::Tensor&, const at::Tensor&, std::byte*) {
  absent();
}
at::Tensor swiglu_cuda(const at::Tensor&) {
  absent();
}
at::Tensor swiglu_backward_cuda(const at::Tensor&, const at::Tensor&) {
  absent();
}
ScoredRows score_rows_cuda(const at::Tensor&, const at::Tensor&, VocabularyRange, double) {
  absent();
}
void logits_to_gradient_cuda(at::Tensor&,
                             const at::Tensor&,
                             const at::Tensor&,
                             const at::Tensor&,
                             const at::Tensor&,
                             VocabularyRange,
                             double) {
  absent();
}
GpuAttention gpu_attention_of(std::int64_t dim, std::int64_t value_dim) {
  return dim == value_dim ? GpuAttention::kFlash : GpuAttention::kCudnn;
}
at::Tensor attention_cuda(const at::Tensor&,
                          const at::Tensor&,
                          const at::Tensor&,
                          const std::vector<AttentionSegment>&,
                          const AttentionOptions&,
                          GpuAttention) {
  absent();
}

}  // namespace ferry::models
