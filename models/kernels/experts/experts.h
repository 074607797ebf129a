// Kernels of a mixture of experts that ask the host for nothing: counts stay on the device, so that
// a step of generation can be a CUDA graph. Choices are numbered token by token: choice t * topk +
// j is the j-th of token t.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "models/kernels/swiglu.h"
#include "models/spec/alignment.h"

namespace ferry::models {

// The experts first .. first + count - 1.
struct OwnExperts {
  std::int64_t first = 0;
  std::int64_t count = 0;
};

// Choices sorted by expert, those of an expert in their own order, those of experts outside of a
// range last.
struct ExpertOrder {
  at::Tensor order{};    // [choices], int64: the choice at each place
  at::Tensor inverse{};  // [choices], int64: the place of each choice
  at::Tensor ends{};     // [range.count], int32: the place behind the last of each expert
};

// choices [choices], int64, on any device, where the result is as well.
ExpertOrder expert_order(const at::Tensor& choices, OwnExperts range);
ExpertOrder expert_order_cuda(const at::Tensor& choices, OwnExperts range);

// The row of x [tokens, ...] for each of the choices at the first `count` places of `places`. Not
// differentiable.
at::Tensor gather_choices(const at::Tensor& x,
                          const ExpertOrder& places,
                          std::int64_t topk,
                          std::int64_t count);
at::Tensor gather_choices_cuda(const at::Tensor& x,
                               const at::Tensor& order,
                               std::int64_t topk,
                               std::int64_t count);

// The row of x for each choice, in the order of `places`. Differentiable: the gradients of a
// token's rows are added in the order of its choices.
at::Tensor rows_of_choices(const at::Tensor& x, const ExpertOrder& places, std::int64_t topk);

// A token is sent once to each rank that has experts of its choices, in rows that the token's first
// choices there stand for. Ranks have `local` experts each; experts [tokens, topk], int64.
//
// The rank of each choice's expert if the choice is the token's first there, else -1: [choices],
// int64.
at::Tensor first_of_ranks(const at::Tensor& experts, std::int64_t local);
at::Tensor first_of_ranks_cuda(const at::Tensor& experts, std::int64_t local);
// The experts that each of rows [n], int64 numbers of such choices, stands for: those of its token
// that its rank has, as that rank counts them, and -1 for others. [n, topk], int32.
at::Tensor choices_of_rows(const at::Tensor& experts, const at::Tensor& rows, std::int64_t local);
at::Tensor choices_of_rows_cuda(const at::Tensor& experts,
                                const at::Tensor& rows,
                                std::int64_t local);

// Sums the results of each token's choices, weighed, in the order of the choices and with the bits
// of (results * weights).sum(1) of ATen. results [choices, hidden], of choice c in row inverse[c];
// inverse [choices] int64, undefined: in row c. Rows from `end` on, [1] int32 where it is defined,
// count nothing and are not read. weights [tokens, topk], of the results' dtype or fp32. Returns
// [tokens, hidden] of the results' dtype. Not differentiable.
at::Tensor combine_choices(const at::Tensor& results,
                           const at::Tensor& inverse,
                           const at::Tensor& weights,
                           const at::Tensor& end = {});
at::Tensor combine_choices_cuda(const at::Tensor& results,
                                const at::Tensor& inverse,
                                const at::Tensor& weights,
                                const at::Tensor& end);

// The gradients of combine_choices() by its results and weights, of their shapes and dtypes; those
// of rows from `end` on are not written, and those of their weights are zeros. grads [tokens,
// hidden] is of its result. Products and sums are in fp32 on a GPU, a weight's sum in an order that
// is the same each time.
struct ChoiceGradients {
  at::Tensor results{};
  at::Tensor weights{};
};
ChoiceGradients combine_choices_backward(const at::Tensor& grads,
                                         const at::Tensor& results,
                                         const ExpertOrder& places,
                                         const at::Tensor& weights,
                                         const at::Tensor& end = {});
ChoiceGradients combine_choices_backward_cuda(const at::Tensor& grads,
                                              const at::Tensor& results,
                                              const at::Tensor& inverse,
                                              const at::Tensor& weights,
                                              const at::Tensor& end);

// combine_choices() of results in the order of `places`, differentiable.
at::Tensor combine_choices_of(const ExpertOrder& places,
                              const at::Tensor& results,
                              const at::Tensor& weights);

// The most probable experts, those of equal probability by their number.
struct ChosenExperts {
  at::Tensor experts{};  // [tokens, topk], int64
  at::Tensor weights{};  // [tokens, topk]: probabilities, of the logits' dtype
};
// Softmax of logits [tokens, experts] in fp32, topk of it, each divided by their sum if
// `normalize`. bf16 or fp32 on a GPU, if chooses_in_one_kernel(). kBitwise: with the bits and,
// among equal ones, the order of ATen's softmax(), topk(), sum() and division. Not differentiable.
inline constexpr std::int64_t kMostChosenFrom = 512;
inline constexpr std::int64_t kMostChoices = 32;
constexpr bool chooses_in_one_kernel(std::int64_t experts, std::int64_t topk) {
  return experts <= kMostChosenFrom && topk <= std::min(experts, kMostChoices);
}
ChosenExperts choose_experts(const at::Tensor& logits,
                             std::int64_t topk,
                             bool normalize,
                             Alignment alignment);

// True if choose_experts() does so in kBitwise: compared once for a number of experts and choices,
// outside of CUDA graphs.
bool chooses_as_aten(std::int64_t experts, std::int64_t topk, at::Device device);

// choose_experts() of x [tokens, hidden] times weight [experts, hidden], both bf16 on a GPU, in one
// kernel, for at most kMostFewTokens tokens. kBitwise: the logits are gemm_nt()'s, and false where
// they, or the choice, would not be, which is found once for a shape, outside of CUDA graphs. Not
// differentiable.
inline constexpr std::int64_t kMostFewTokens = 4;
bool few_routed_supported(const at::Tensor& x,
                          const at::Tensor& weight,
                          std::int64_t topk,
                          Alignment alignment);
ChosenExperts route_few(const at::Tensor& x,
                        const at::Tensor& weight,
                        std::int64_t topk,
                        bool normalize,
                        Alignment alignment);

// Feed-forward layers of experts, in bf16.
struct ExpertWeights {
  at::Tensor fc1{};                      // [experts, 2 * ffn, hidden]
  at::Tensor fc2{};                      // [experts, hidden, ffn]
  at::Tensor fc1_bias{};                 // [experts, 2 * ffn], or undefined
  at::Tensor fc2_bias{};                 // [experts, hidden], the same
  std::optional<QuickGeglu> quick = {};  // instead of swiglu
};

// True where kernels of our own serve the products of these experts on a GPU, which read an
// expert's weights once for 64 of its rows, and no weights of others. Their sums are those of
// grouped products; in kBitwise that is compared once for shapes of weights, outside of CUDA
// graphs, and false where it does not hold.
bool serves_experts(const ExpertWeights& weights, Alignment alignment);

// The gated products of choices, activated: rows of x [tokens, hidden] in the order of `places`,
// whose experts are the weights' -> [choices, ffn]. Rows behind the last expert's are not written.
// Not differentiable.
at::Tensor gated_expert_products(const at::Tensor& x,
                                 const ExpertOrder& places,
                                 std::int64_t topk,
                                 const ExpertWeights& weights);
// The products of rows [rows, k] in that order with weights [experts, n, k], plus `biases`
// [experts, n], or undefined -> [rows, n]. The same holds.
at::Tensor expert_products(const at::Tensor& rows,
                           const at::Tensor& ends,
                           const at::Tensor& weights,
                           const at::Tensor& biases);

// combine_choices() of the products of both, [tokens, hidden], for at most kMostFewTokens tokens
// that are unlikely to share experts: a layer of two kernels, which read an expert once for each
// token. x [tokens, hidden], experts [tokens, topk] int64, of_choices [tokens, topk]. kBitwise: the
// same bits. A row's result depends on no other row. Not differentiable.
bool few_tokens_supported(const ExpertWeights& weights,
                          const at::Tensor& experts,
                          Alignment alignment);
at::Tensor apply_experts_to_few_tokens(const at::Tensor& x,
                                       const at::Tensor& experts,
                                       const at::Tensor& of_choices,
                                       const ExpertWeights& weights,
                                       Alignment alignment);

}  // namespace ferry::models
