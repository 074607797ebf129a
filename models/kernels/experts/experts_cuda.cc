#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>

#include <limits>
#include <tuple>
#include <vector>

#include "distckpt/base/error.h"
#include "models/kernels/cuda/cuda_call.h"
#include "models/kernels/experts/expert_launch.h"
#include "models/kernels/experts/experts.h"
#include "models/kernels/experts/known_once.h"
#include "models/kernels/experts/sigmoid_choice.h"
#include "models/kernels/product/gemm.h"

namespace ferry::models {
namespace {

launch::Element expert_element(const at::Tensor& x) {
  require(x.is_cuda() && x.is_contiguous() &&
              (x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kFloat),
          ErrorKind::kBug, "kernels of experts take contiguous bf16 or fp32 on a GPU");
  return x.scalar_type() == at::kFloat ? launch::Element::kFloat : launch::Element::kBf16;
}

launch::ChoicesShape shape_of(const at::Tensor& of_choices, std::int64_t experts = 0) {
  return {.tokens = of_choices.size(0), .topk = of_choices.size(1), .experts = experts};
}

const void* data_or_null(const at::Tensor& values) {
  return values.defined() ? values.const_data_ptr() : nullptr;
}

// Rows of x in the order of `places`, or, without one, as they are.
at::Tensor grouped_products(const at::Tensor& x,
                            const ExpertOrder& places,
                            const at::Tensor& weights,
                            const at::Tensor& biases,
                            const launch::GroupedShape& shape) {
  const c10::cuda::CUDAGuard device(x.device());
  const auto rows = x.contiguous();
  const auto added = biases.defined() ? biases.contiguous() : biases;
  const bool ordered = places.order.defined();
  auto y =
      at::empty({ordered ? places.order.size(0) : rows.size(0), shape.columns}, rows.options());
  if (y.numel() == 0) return y;
  check(launch::grouped_expert_rows(
      rows.const_data_ptr(), ordered ? places.order.const_data_ptr<std::int64_t>() : nullptr,
      places.ends.const_data_ptr<std::int32_t>(), weights.const_data_ptr(), data_or_null(added),
      y.mutable_data_ptr(), shape, stream()));
  return y;
}

// True if our kernels add up along K as grouped products do: compared on operands whose sums
// cancel, so that results consist of roundings. Experts have none, few and many rows, and tokens
// are few. The gated kernels differ in what they make of their sums.
bool adds_as_grouped_products(const at::Tensor& weight) {
  const std::vector<std::int64_t> counts{3, 24, 0, 150};
  constexpr std::int64_t kFew = 4;  // rows of the kernels for few tokens
  const auto experts = static_cast<std::int64_t>(counts.size());
  const auto n = weight.size(1);
  const auto k = weight.size(2);
  if (!launch::grouped_experts_supported({.experts = experts, .in = k, .columns = n})) return false;
  std::vector<std::int32_t> last;
  std::int64_t total = 0;
  for (const auto count : counts) last.push_back(static_cast<std::int32_t>(total += count));
  const auto of_sums_that_cancel = [&](at::IntArrayRef sizes, double sign) {
    auto values = at::randn(sizes, weight.options());
    values.narrow(-1, k / 2, k / 2).copy_(values.narrow(-1, 0, k / 2) * sign);
    return values;
  };
  const auto weights = of_sums_that_cancel({experts, n, k}, -1);
  const auto rows = of_sums_that_cancel({total, k}, 1);
  const auto ends = at::tensor(last, at::kInt).to(weight.device());
  const auto expected = at::_grouped_mm(rows, weights.transpose(1, 2), ends);
  if (!at::equal(expert_products(rows, ends, weights, {}), expected)) return false;
  const launch::FewRowsShape few{.choices = {.tokens = kFew, .topk = 1}, .in = k, .columns = n};
  const auto choices = at::tensor({0, 0, 0, 1}, rows.options().dtype(at::kLong));
  const auto ones = at::ones({kFew, 1}, rows.options());
  auto y = at::empty({kFew, n}, rows.options());
  check(launch::ordered_combined_rows(rows.const_data_ptr(), choices.const_data_ptr<std::int64_t>(),
                                      weights.const_data_ptr(), nullptr, ones.const_data_ptr(),
                                      y.mutable_data_ptr(), few, launch::Element::kBf16, stream()));
  return at::equal(y, expected.narrow(0, 0, kFew));
}

bool has_order_of_grouped_products(const at::Tensor& weight) {
  static KnownOnce<std::tuple<int, std::int64_t, std::int64_t>> known;
  return known({weight.device().index(), weight.size(1), weight.size(2)},
               [&] { return adds_as_grouped_products(weight); });
}

bool are_of_kernels(const ExpertWeights& weights) {
  return weights.fc1.is_cuda() && weights.fc1.scalar_type() == at::kBFloat16 &&
         weights.fc1.is_contiguous() && weights.fc2.is_contiguous();
}

launch::GatedActivation activation_of(const ExpertWeights& weights) {
  constexpr float kUnlimited = std::numeric_limits<float>::infinity();
  const auto& quick = weights.quick;
  if (!quick) return {};
  return {.quick = true,
          .clamp = quick->clamp ? static_cast<float>(*quick->clamp) : kUnlimited,
          .offset = static_cast<float>(quick->offset)};
}

// The shapes of the gated product, and of the one behind it.
launch::FewRowsShape gated_shape(const at::Tensor& choices, const ExpertWeights& weights) {
  return {.choices = shape_of(choices),
          .in = weights.fc1.size(2),
          .columns = weights.fc2.size(2),
          .activation = activation_of(weights)};
}
launch::FewRowsShape second_shape(launch::FewRowsShape shape, const ExpertWeights& weights) {
  shape.in = weights.fc2.size(2);
  shape.columns = weights.fc2.size(1);
  return shape;
}

// Half of the logits have few values, so that many are equal; in fp32 every rounding shows.
at::Tensor logits_with_ties(std::int64_t experts, at::Device device) {
  auto logits = at::randn({1024, experts}, at::TensorOptions(device).dtype(at::kFloat));
  logits.narrow(0, 0, 512).mul_(2).round_();
  return logits;
}

launch::SigmoidShape sigmoid_shape(std::int64_t tokens,
                                   std::int64_t experts,
                                   const SigmoidChoice& choice) {
  return {.choices = {.tokens = tokens, .topk = choice.topk, .experts = experts},
          .groups = choice.groups,
          .group_topk = choice.group_topk,
          .scaling_factor = static_cast<float>(choice.scaling_factor)};
}

}  // namespace

ExpertOrder expert_order_cuda(const at::Tensor& choices, OwnExperts range) {
  const c10::cuda::CUDAGuard device(choices.device());
  const auto from = choices.contiguous();
  ExpertOrder result{.order = at::empty_like(from),
                     .inverse = at::empty_like(from),
                     .ends = at::empty({range.count}, from.options().dtype(at::kInt))};
  check(launch::expert_order(
      from.const_data_ptr<std::int64_t>(), result.order.mutable_data_ptr<std::int64_t>(),
      result.inverse.mutable_data_ptr<std::int64_t>(), result.ends.mutable_data_ptr<std::int32_t>(),
      from.numel(), range.first, range.count, stream()));
  return result;
}

at::Tensor gather_choices_cuda(const at::Tensor& x,
                               const at::Tensor& order,
                               std::int64_t topk,
                               std::int64_t count) {
  const c10::cuda::CUDAGuard device(x.device());
  const auto from = x.contiguous();
  auto shape = from.sizes().vec();
  shape[0] = count;
  auto rows = at::empty(shape, from.options());
  if (rows.numel() == 0) return rows;
  require(count <= order.size(0), ErrorKind::kBug, "{} of {} choices", count, order.size(0));
  check(launch::gather_rows(from.const_data_ptr(), order.const_data_ptr<std::int64_t>(),
                            rows.mutable_data_ptr(), count, topk,
                            static_cast<std::int64_t>(rows.nbytes()) / count, stream()));
  return rows;
}

at::Tensor first_of_ranks_cuda(const at::Tensor& experts, std::int64_t local) {
  const c10::cuda::CUDAGuard device(experts.device());
  const auto from = experts.contiguous();
  auto ranks = at::empty({from.numel()}, from.options());
  if (from.numel() == 0) return ranks;
  check(launch::first_of_ranks(from.const_data_ptr<std::int64_t>(),
                               ranks.mutable_data_ptr<std::int64_t>(), shape_of(from, local),
                               stream()));
  return ranks;
}

at::Tensor choices_of_rows_cuda(const at::Tensor& experts,
                                const at::Tensor& rows,
                                std::int64_t local) {
  const c10::cuda::CUDAGuard device(experts.device());
  const auto from = experts.contiguous();
  const auto numbers = rows.contiguous();
  auto choices = at::empty({numbers.size(0), from.size(1)}, from.options().dtype(at::kInt));
  if (choices.numel() == 0) return choices;
  check(launch::choices_of_rows(
      from.const_data_ptr<std::int64_t>(), numbers.const_data_ptr<std::int64_t>(),
      choices.mutable_data_ptr<std::int32_t>(), numbers.size(0), shape_of(from, local), stream()));
  return choices;
}

at::Tensor combine_choices_cuda(const at::Tensor& results,
                                const at::Tensor& inverse,
                                const at::Tensor& weights,
                                const at::Tensor& end) {
  const c10::cuda::CUDAGuard device(results.device());
  const auto in = results.contiguous();
  const auto of_choices = weights.contiguous();
  const auto shape = shape_of(of_choices);
  require(end.defined() || in.size(0) == shape.tokens * shape.topk, ErrorKind::kBug,
          "results of {} choices for {} tokens", in.size(0), shape.tokens);
  auto y = at::empty({shape.tokens, in.size(1)}, in.options());
  if (y.numel() == 0) return y;
  check(launch::combine_choices(
      in.const_data_ptr(), inverse.defined() ? inverse.const_data_ptr<std::int64_t>() : nullptr,
      end.defined() ? end.const_data_ptr<std::int32_t>() : nullptr, of_choices.const_data_ptr(),
      y.mutable_data_ptr(), shape, in.size(1), expert_element(in), expert_element(of_choices),
      stream()));
  return y;
}

ChoiceGradients combine_choices_backward_cuda(const at::Tensor& grads,
                                              const at::Tensor& results,
                                              const at::Tensor& inverse,
                                              const at::Tensor& weights,
                                              const at::Tensor& end) {
  const c10::cuda::CUDAGuard device(results.device());
  const auto of_tokens = grads.contiguous();
  const auto in = results.contiguous();
  const auto of_choices = weights.contiguous();
  const auto shape = shape_of(of_choices);
  ChoiceGradients gradients{.results = at::empty_like(in), .weights = at::empty_like(of_choices)};
  if (of_choices.numel() == 0 || in.size(1) == 0) return gradients;
  check(launch::combine_choices_backward(
      of_tokens.const_data_ptr(), in.const_data_ptr(), inverse.const_data_ptr<std::int64_t>(),
      end.defined() ? end.const_data_ptr<std::int32_t>() : nullptr, of_choices.const_data_ptr(),
      gradients.results.mutable_data_ptr(), gradients.weights.mutable_data_ptr(), shape, in.size(1),
      expert_element(in), expert_element(of_choices), stream()));
  return gradients;
}

bool chooses_as_aten(std::int64_t experts, std::int64_t topk, at::Device device) {
  if (!chooses_in_one_kernel(experts, topk)) return false;
  static KnownOnce<std::tuple<int, std::int64_t, std::int64_t>> known;
  return known({device.index(), experts, topk}, [&] {
    const auto logits = logits_with_ties(experts, device);
    const auto chosen = choose_experts(logits, topk, /*normalize=*/true, Alignment::kBitwise);
    const auto [best, which] = at::topk(at::softmax(logits, -1), topk, -1);
    return at::equal(chosen.experts, which) &&
           at::equal(chosen.weights, best / best.sum(-1, /*keepdim=*/true));
  });
}

ChosenExperts choose_by_sigmoid(const at::Tensor& logits,
                                const at::Tensor& bias,
                                const SigmoidChoice& choice) {
  const c10::cuda::CUDAGuard device(logits.device());
  const auto in = logits.contiguous();
  const auto more = bias.defined() ? bias.contiguous() : bias;
  require(in.scalar_type() == at::kFloat &&
              (!more.defined() || (more.scalar_type() == at::kFloat && more.numel() == in.size(1))),
          ErrorKind::kBug, "sigmoids of logits take fp32");
  ChosenExperts chosen{
      .experts = at::empty({in.size(0), choice.topk}, in.options().dtype(at::kLong)),
      .weights = at::empty({in.size(0), choice.topk}, in.options()),
  };
  if (in.size(0) == 0) return chosen;
  check(launch::choose_by_sigmoid(
      in.const_data_ptr<float>(), more.defined() ? more.const_data_ptr<float>() : nullptr,
      chosen.experts.mutable_data_ptr<std::int64_t>(), chosen.weights.mutable_data_ptr<float>(),
      sigmoid_shape(in.size(0), in.size(1), choice), stream()));
  return chosen;
}

bool chooses_by_sigmoid(std::int64_t experts,
                        const SigmoidChoice& choice,
                        at::Device device,
                        Alignment alignment) {
  if (!device.is_cuda() || !launch::sigmoid_choice_supported(sigmoid_shape(1, experts, choice)))
    return false;
  if (alignment == Alignment::kFast) return true;
  static KnownOnce<std::tuple<int, std::int64_t, SigmoidChoice>> known;
  return known({device.index(), experts, choice}, [&] {
    const auto logits = logits_with_ties(experts, device);
    const auto bias = at::round(at::randn({experts}, logits.options()) * 4) / 64;
    const auto chosen = choose_by_sigmoid(logits, bias, choice);
    const auto scores = at::sigmoid(logits);
    const auto which = experts_by_scores(scores, bias, choice);
    return at::equal(chosen.experts, which) &&
           at::equal(chosen.weights, weights_by_scores(scores, which, choice));
  });
}

ChosenExperts choose_experts(const at::Tensor& logits,
                             std::int64_t topk,
                             bool normalize,
                             Alignment alignment) {
  const c10::cuda::CUDAGuard device(logits.device());
  const auto in = logits.contiguous();
  ChosenExperts chosen{
      .experts = at::empty({in.size(0), topk}, in.options().dtype(at::kLong)),
      .weights = at::empty({in.size(0), topk}, in.options()),
  };
  if (in.size(0) == 0) return chosen;
  check(launch::choose_experts(in.const_data_ptr(), chosen.experts.mutable_data_ptr<std::int64_t>(),
                               chosen.weights.mutable_data_ptr(),
                               shape_of(chosen.experts, in.size(1)), normalize,
                               alignment == Alignment::kBitwise, expert_element(in), stream()));
  return chosen;
}

bool few_routed_supported(const at::Tensor& x,
                          const at::Tensor& weight,
                          std::int64_t topk,
                          Alignment alignment) {
  if (!x.is_cuda() || x.scalar_type() != at::kBFloat16 || x.size(0) > kMostFewTokens ||
      weight.scalar_type() != at::kBFloat16 || !weight.is_contiguous() ||
      !chooses_in_one_kernel(weight.size(0), topk))
    return false;
  const launch::ChoicesShape shape{.tokens = x.size(0), .topk = topk, .experts = weight.size(0)};
  const auto hidden = weight.size(1);
  if (alignment == Alignment::kFast) return launch::route_few_supported(shape, hidden);
  return launch::route_ordered_supported(shape, hidden) && adds_in_order(weight) &&
         chooses_as_aten(weight.size(0), topk, x.device());
}

ChosenExperts route_few(const at::Tensor& x,
                        const at::Tensor& weight,
                        std::int64_t topk,
                        bool normalize,
                        Alignment alignment) {
  const c10::cuda::CUDAGuard device(x.device());
  const auto rows = x.contiguous();
  const auto logits = at::empty({rows.size(0), weight.size(0)}, rows.options());
  ChosenExperts chosen{
      .experts = at::empty({rows.size(0), topk}, rows.options().dtype(at::kLong)),
      .weights = at::empty({rows.size(0), topk}, rows.options()),
  };
  if (rows.size(0) == 0) return chosen;
  const auto route = alignment == Alignment::kFast ? launch::route_few : launch::route_ordered;
  check(route(rows.const_data_ptr(), weight.const_data_ptr(), logits.mutable_data_ptr(),
              chosen.experts.mutable_data_ptr<std::int64_t>(), chosen.weights.mutable_data_ptr(),
              shape_of(chosen.experts, weight.size(0)), weight.size(1), normalize, stream()));
  return chosen;
}

bool serves_experts(const ExpertWeights& weights, Alignment alignment) {
  const auto& [fc1, fc2, fc1_bias, fc2_bias, quick] = weights;
  if (!are_of_kernels(weights)) return false;
  const auto supported = [](const at::Tensor& weight, std::int64_t halves) {
    return launch::grouped_experts_supported({.experts = weight.size(0),
                                              .in = weight.size(2),
                                              .columns = weight.size(1) / halves,
                                              .gated = halves == 2});
  };
  return supported(fc1, 2) && supported(fc2, 1) &&
         (alignment == Alignment::kFast ||
          (has_order_of_grouped_products(fc1) && has_order_of_grouped_products(fc2)));
}

at::Tensor gated_expert_products(const at::Tensor& x,
                                 const ExpertOrder& places,
                                 std::int64_t topk,
                                 const ExpertWeights& weights) {
  return grouped_products(x, places, weights.fc1, weights.fc1_bias,
                          {.experts = weights.fc1.size(0),
                           .in = weights.fc1.size(2),
                           .columns = weights.fc1.size(1) / 2,
                           .gated = true,
                           .activation = activation_of(weights),
                           .topk = topk});
}

at::Tensor expert_products(const at::Tensor& rows,
                           const at::Tensor& ends,
                           const at::Tensor& weights,
                           const at::Tensor& biases) {
  return grouped_products(
      rows, {.ends = ends}, weights, biases,
      {.experts = weights.size(0), .in = weights.size(2), .columns = weights.size(1)});
}

// Reading an expert once for all tokens is faster where they share many
// (tests/bench/kernels/experts_bench.cc).
bool few_tokens_supported(const ExpertWeights& weights,
                          const at::Tensor& experts,
                          Alignment alignment) {
  constexpr std::int64_t kExpertsForAChoice = 4;
  const auto choices = experts.numel();
  if (experts.size(0) > kMostFewTokens ||
      (experts.size(0) > 1 && kExpertsForAChoice * choices > weights.fc1.size(0)) ||
      !are_of_kernels(weights))
    return false;
  const auto gated = gated_shape(experts, weights);
  const auto second = second_shape(gated, weights);
  if (alignment == Alignment::kFast)
    return launch::few_tokens_supported(gated) && launch::few_tokens_supported(second);
  return launch::ordered_experts_supported(gated) && launch::ordered_experts_supported(second) &&
         serves_experts(weights, alignment);
}

at::Tensor apply_experts_to_few_tokens(const at::Tensor& x,
                                       const at::Tensor& experts,
                                       const at::Tensor& of_choices,
                                       const ExpertWeights& weights,
                                       Alignment alignment) {
  const c10::cuda::CUDAGuard device(x.device());
  const auto& [fc1, fc2, fc1_bias, fc2_bias, quick] = weights;
  const auto rows = x.contiguous();
  const auto choices = experts.contiguous();
  const auto weighed = of_choices.contiguous();
  const auto shape = gated_shape(choices, weights);
  auto hidden = at::empty({choices.numel(), shape.columns}, rows.options());
  auto y = at::empty({rows.size(0), fc2.size(1)}, rows.options());
  if (choices.numel() == 0) return y;
  const auto* const numbers = choices.const_data_ptr<std::int64_t>();
  const bool fast = alignment == Alignment::kFast;
  const auto gated = fast ? launch::gated_expert_rows : launch::ordered_gated_rows;
  const auto combined = fast ? launch::combined_expert_rows : launch::ordered_combined_rows;
  check(gated(rows.const_data_ptr(), numbers, fc1.const_data_ptr(), data_or_null(fc1_bias),
              hidden.mutable_data_ptr(), shape, stream()));
  check(combined(hidden.const_data_ptr(), numbers, fc2.const_data_ptr(), data_or_null(fc2_bias),
                 weighed.const_data_ptr(), y.mutable_data_ptr(), second_shape(shape, weights),
                 expert_element(weighed), stream()));
  return y;
}

}  // namespace ferry::models
