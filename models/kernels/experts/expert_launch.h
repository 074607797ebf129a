// Launches of the kernels of experts.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "models/kernels/cuda/cuda_launch.h"

namespace ferry::models::launch {

cudaError_t expert_order(const std::int64_t* choices,
                         std::int64_t* order,
                         std::int64_t* inverse,
                         std::int32_t* ends,
                         std::int64_t num_choices,
                         std::int64_t first_expert,
                         std::int64_t num_experts,
                         cudaStream_t stream);

struct ChoicesShape {
  std::int64_t tokens = 0;
  std::int64_t topk = 0;
  std::int64_t experts = 0;
};

// Row order[i] / topk of x for each of num_rows rows of row_bytes bytes.
cudaError_t gather_rows(const void* x,
                        const std::int64_t* order,
                        void* rows,
                        std::int64_t num_rows,
                        std::int64_t topk,
                        std::int64_t row_bytes,
                        cudaStream_t stream);

// first_of_ranks() and choices_of_rows() for shape.experts of each rank.
cudaError_t first_of_ranks(const std::int64_t* experts,
                           std::int64_t* ranks,
                           ChoicesShape shape,
                           cudaStream_t stream);
cudaError_t choices_of_rows(const std::int64_t* experts,
                            const std::int64_t* rows,
                            std::int32_t* choices,
                            std::int64_t num_rows,
                            ChoicesShape shape,
                            cudaStream_t stream);

// `inverse` and `end` may be null.
cudaError_t combine_choices(const void* results,
                            const std::int64_t* inverse,
                            const std::int32_t* end,
                            const void* weights,
                            void* y,
                            ChoicesShape shape,
                            std::int64_t hidden,
                            Element element,
                            Element of_weights,
                            cudaStream_t stream);

cudaError_t combine_choices_backward(const void* grads,  // [tokens, hidden]
                                     const void* results,
                                     const std::int64_t* inverse,
                                     const std::int32_t* end,  // or null
                                     const void* weights,
                                     void* grads_of_results,
                                     void* grads_of_weights,
                                     ChoicesShape shape,
                                     std::int64_t hidden,
                                     Element element,
                                     Element of_weights,
                                     cudaStream_t stream);

cudaError_t choose_experts(const void* logits,
                           std::int64_t* experts,
                           void* weights,
                           ChoicesShape shape,
                           bool normalize,
                           bool as_aten,  // equal ones in the order of ATen's topk()
                           Element element,
                           cudaStream_t stream);

// choose_by_sigmoid() of sigmoid_choice.h.
struct SigmoidShape {
  ChoicesShape choices{};
  std::int64_t groups = 1;
  std::int64_t group_topk = 1;
  float scaling_factor = 1;
};
bool sigmoid_choice_supported(const SigmoidShape& shape);
cudaError_t choose_by_sigmoid(const float* logits,
                              const float* bias,  // or null
                              std::int64_t* experts,
                              float* weights,
                              const SigmoidShape& shape,
                              cudaStream_t stream);

// The activation that joins the halves of a gated product: swiglu, or quick_geglu with these
// settings.
struct GatedActivation {
  bool quick = false;
  float clamp = 0;
  float offset = 0;
};

// Products with the weights of experts in bf16, [experts, columns, in], of rows that are sorted by
// expert, those of expert e up to ends[e]; gated: [experts, 2 * columns, in], whose halves the
// activation joins. Results lie as the rows do; those of no expert are not written. Sums are those
// of grouped products (models/kernels/cuda/ordered_columns.cuh).
struct GroupedShape {
  std::int64_t experts = 0;
  std::int64_t in = 0;       // a multiple of 64
  std::int64_t columns = 0;  // a multiple of 8; less than 2^31 numbers of an expert
  bool gated = false;
  GatedActivation activation{};
  std::int64_t topk = 1;  // row i is row order[i] / topk of x
};
bool grouped_experts_supported(const GroupedShape& shape);
cudaError_t grouped_expert_rows(const void* x,
                                const std::int64_t* order,  // or null: row i is row i of x
                                const std::int32_t* ends,   // [experts]
                                const void* weights,
                                const void* biases,  // or null: [experts, rows of its weights]
                                void* y,
                                GroupedShape shape,
                                cudaStream_t stream);

// The same for few tokens: an expert is read once for each token that chose it. First the gated
// product of a row for each token, y [choices, columns], then the other with combine_choices() of
// it, y [tokens, columns], which follows the first one at once.
struct FewRowsShape {
  ChoicesShape choices{};
  std::int64_t in = 0;
  std::int64_t columns = 0;
  GatedActivation activation{};
};
using ExpertProduct = cudaError_t(const void* x,
                                  const std::int64_t* choices,
                                  const void* weights,
                                  const void* biases,  // or null
                                  void* y,
                                  FewRowsShape shape,
                                  cudaStream_t stream);
using CombinedProduct = cudaError_t(const void* x,
                                    const std::int64_t* choices,
                                    const void* weights,
                                    const void* biases,      // or null
                                    const void* of_choices,  // [tokens, topk]
                                    void* y,
                                    FewRowsShape shape,
                                    Element of_weights,  // of `of_choices`
                                    cudaStream_t stream);
bool few_tokens_supported(const FewRowsShape& shape);
ExpertProduct gated_expert_rows;
CombinedProduct combined_expert_rows;
// The same with the sums of grouped products. A token chooses an expert once.
bool ordered_experts_supported(const FewRowsShape& shape);
ExpertProduct ordered_gated_rows;
CombinedProduct ordered_combined_rows;

// The logits of few tokens, x [tokens, hidden] by weight [experts, hidden], all in bf16, and
// choose_experts() of them. route_ordered(): the logits of ordered_rows_product(), chosen as ATen
// does, for at most 8 tokens.
using RouteProduct = cudaError_t(const void* x,
                                 const void* weight,
                                 void* logits,  // [tokens, experts]
                                 std::int64_t* experts,
                                 void* weights,
                                 ChoicesShape shape,
                                 std::int64_t hidden,
                                 bool normalize,
                                 cudaStream_t stream);
bool route_few_supported(ChoicesShape shape, std::int64_t hidden);
RouteProduct route_few;
bool route_ordered_supported(ChoicesShape shape, std::int64_t hidden);
RouteProduct route_ordered;

}  // namespace ferry::models::launch
