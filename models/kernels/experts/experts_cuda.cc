#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>

#include <limits>

#include "distckpt/base/error.h"
#include "models/kernels/cuda/cuda_call.h"
#include "models/kernels/experts/expert_launch.h"
#include "models/kernels/experts/experts.h"

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

at::Tensor combine_choices_cuda(const at::Tensor& results,
                                const at::Tensor& inverse,
                                const at::Tensor& weights,
                                const at::Tensor& end) {
  const c10::cuda::CUDAGuard device(results.device());
  const auto in = results.contiguous();
  const auto of_choices = weights.contiguous();
  const auto shape = shape_of(of_choices);
  require(in.size(0) == shape.tokens * shape.topk, ErrorKind::kBug,
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

ChosenExperts choose_experts(const at::Tensor& logits, std::int64_t topk, bool normalize) {
  const c10::cuda::CUDAGuard device(logits.device());
  const auto in = logits.contiguous();
  ChosenExperts chosen{
      .experts = at::empty({in.size(0), topk}, in.options().dtype(at::kLong)),
      .weights = at::empty({in.size(0), topk}, in.options()),
  };
  if (in.size(0) == 0) return chosen;
  check(launch::choose_experts(in.const_data_ptr(), chosen.experts.mutable_data_ptr<std::int64_t>(),
                               chosen.weights.mutable_data_ptr(),
                               shape_of(chosen.experts, in.size(1)), normalize, expert_element(in),
                               stream()));
  return chosen;
}

bool few_choices_supported(const ExpertWeights& weights, std::int64_t choices) {
  const auto& [fc1, fc2, fc1_bias, fc2_bias, quick] = weights;
  return fc1.is_cuda() && fc1.scalar_type() == at::kBFloat16 && choices <= kMostFewChoices &&
         fc1.is_contiguous() && fc2.is_contiguous() && launch::few_rows_supported(fc1.size(2)) &&
         launch::few_rows_supported(fc2.size(2));
}

at::Tensor apply_experts_to_few(const at::Tensor& x,
                                const at::Tensor& experts,
                                const ExpertWeights& weights) {
  const c10::cuda::CUDAGuard device(x.device());
  const auto& [fc1, fc2, fc1_bias, fc2_bias, quick] = weights;
  const auto rows = x.contiguous();
  const auto choices = experts.contiguous();
  launch::FewRowsShape shape{.choices = shape_of(choices, fc1.size(0)),
                             .in = fc1.size(2),
                             .columns = fc2.size(2),
                             .gated = true,
                             .of_tokens = true,
                             .quick = quick.has_value()};
  if (quick) {
    constexpr float kUnlimited = std::numeric_limits<float>::infinity();
    shape.clamp = quick->clamp ? static_cast<float>(*quick->clamp) : kUnlimited;
    shape.offset = static_cast<float>(quick->offset);
  }
  auto hidden = at::empty({choices.numel(), shape.columns}, rows.options());
  auto y = at::empty({choices.numel(), fc2.size(1)}, rows.options());
  if (choices.numel() == 0) return y;
  const auto* const numbers = choices.const_data_ptr<std::int64_t>();
  const auto bias = [](const at::Tensor& values) {
    return values.defined() ? values.const_data_ptr() : nullptr;
  };
  check(launch::expert_rows(rows.const_data_ptr(), numbers, fc1.const_data_ptr(), bias(fc1_bias),
                            hidden.mutable_data_ptr(), shape, stream()));
  shape.in = fc2.size(2);
  shape.columns = fc2.size(1);
  shape.gated = false;
  shape.of_tokens = false;
  check(launch::expert_rows(hidden.const_data_ptr(), numbers, fc2.const_data_ptr(), bias(fc2_bias),
                            y.mutable_data_ptr(), shape, stream()));
  return y;
}

}  // namespace ferry::models
