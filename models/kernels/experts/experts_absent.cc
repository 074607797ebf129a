#include "models/device/no_cuda.h"
#include "models/kernels/experts/experts.h"
#include "models/kernels/experts/sigmoid_choice.h"

namespace ferry::models {

// clang-format off
using Input = const at::Tensor&;

ExpertOrder expert_order_cuda(Input, OwnExperts) { no_cuda(); }
at::Tensor combine_choices_cuda(Input, Input, Input, Input) { no_cuda(); }
at::Tensor gather_choices_cuda(Input, Input, std::int64_t, std::int64_t) { no_cuda(); }
at::Tensor first_of_ranks_cuda(Input, std::int64_t) { no_cuda(); }
at::Tensor choices_of_rows_cuda(Input, Input, std::int64_t) { no_cuda(); }
ChoiceGradients combine_choices_backward_cuda(Input, Input, Input, Input, Input) { no_cuda(); }
bool chooses_as_aten(std::int64_t, std::int64_t, at::Device) { return false; }
ChosenExperts choose_experts(Input, std::int64_t, bool, Alignment) { no_cuda(); }
ChosenExperts choose_by_sigmoid(Input, Input, const SigmoidChoice&) { no_cuda(); }
bool chooses_by_sigmoid(std::int64_t, const SigmoidChoice&, at::Device, Alignment) { return false; }
bool few_routed_supported(Input, Input, std::int64_t, Alignment) { return false; }
ChosenExperts route_few(Input, Input, std::int64_t, bool, Alignment) { no_cuda(); }
bool serves_experts(const ExpertWeights&, Alignment) { return false; }
at::Tensor gated_expert_products(Input, const ExpertOrder&, std::int64_t, const ExpertWeights&) { no_cuda(); }
at::Tensor expert_products(Input, Input, Input, Input) { no_cuda(); }
bool few_tokens_supported(const ExpertWeights&, Input, Alignment) { return false; }
at::Tensor apply_experts_to_few_tokens(Input, Input, Input, const ExpertWeights&, Alignment) { no_cuda(); }
// clang-format on

}  // namespace ferry::models
