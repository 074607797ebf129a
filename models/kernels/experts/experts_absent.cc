#include "models/device/no_cuda.h"
#include "models/kernels/experts/experts.h"
#include "models/kernels/experts/sigmoid_choice.h"

namespace ferry::models {

ExpertOrder expert_order_cuda(const at::Tensor&, OwnExperts) {
  no_cuda();
}
at::Tensor combine_choices_cuda(const at::Tensor&,
                                const at::Tensor&,
                                const at::Tensor&,
                                const at::Tensor&) {
  no_cuda();
}
at::Tensor gather_choices_cuda(const at::Tensor&, const at::Tensor&, std::int64_t, std::int64_t) {
  no_cuda();
}
at::Tensor first_of_ranks_cuda(const at::Tensor&, std::int64_t) {
  no_cuda();
}
at::Tensor choices_of_rows_cuda(const at::Tensor&, const at::Tensor&, std::int64_t) {
  no_cuda();
}
ChoiceGradients combine_choices_backward_cuda(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&) {
  no_cuda();
}
bool chooses_as_aten(std::int64_t, std::int64_t, at::Device) {
  return false;
}
ChosenExperts choose_experts(const at::Tensor&, std::int64_t, bool, Alignment) {
  no_cuda();
}
ChosenExperts choose_by_sigmoid(const at::Tensor&, const at::Tensor&, const SigmoidChoice&) {
  no_cuda();
}
bool chooses_by_sigmoid(std::int64_t, const SigmoidChoice&, at::Device, Alignment) {
  return false;
}
bool few_routed_supported(const at::Tensor&, const at::Tensor&, std::int64_t, Alignment) {
  return false;
}
ChosenExperts route_few(const at::Tensor&, const at::Tensor&, std::int64_t, bool, Alignment) {
  no_cuda();
}
bool few_choices_supported(const ExpertWeights&, std::int64_t, Alignment) {
  return false;
}
at::Tensor apply_experts_to_few(const at::Tensor&,
                                const at::Tensor&,
                                const ExpertWeights&,
                                Alignment) {
  no_cuda();
}
bool few_tokens_supported(const ExpertWeights&, const at::Tensor&, Alignment) {
  return false;
}
at::Tensor apply_experts_to_few_tokens(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const ExpertWeights&, Alignment) {
  no_cuda();
}

}  // namespace ferry::models
