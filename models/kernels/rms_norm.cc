#include "models/kernels/rms_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>

#include "models/kernels/rms_norm_cuda.h"

namespace ferry::models {
namespace {

// {x + delta, the norm of it}; x itself where there is no delta.
class FusedRmsNorm : public torch::autograd::Function<FusedRmsNorm> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context,
                                                const at::Tensor& x,
                                                const std::optional<at::Tensor>& delta,
                                                const at::Tensor& weight,
                                                double epsilon,
                                                NormRounding rounding,
                                                bool gathered) {
    const auto result =
        rms_norm_cuda(x, delta.value_or(at::Tensor()), weight, epsilon, rounding, gathered);
    context->save_for_backward({result.sum, weight, result.inverse_rms});
    context->saved_data["added"] = delta.has_value();
    context->saved_data["rounding"] = static_cast<std::int64_t>(rounding);
    context->set_materialize_grads(false);
    if (!delta) return {result.y};
    return {result.y, result.sum};
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const bool added = context->saved_data["added"].toBool();
    const auto of_y = grads[0].defined() ? grads[0].contiguous() : at::zeros_like(saved[0]);
    const auto [of_x, of_weight] =
        rms_norm_backward_cuda(of_y, saved[0], saved[1], saved[2], added ? grads[1] : at::Tensor(),
                               static_cast<NormRounding>(context->saved_data["rounding"].toInt()));
    return {of_x, added ? of_x : at::Tensor(), of_weight, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

bool is_fused(const at::Tensor& x) {
  return x.is_cuda() && rms_norm_cuda_supports(x.size(-1));
}

}  // namespace

at::Tensor rms_norm(const at::Tensor& x,
                    const at::Tensor& weight,
                    double epsilon,
                    NormRounding rounding,
                    bool gathered) {
  if (is_fused(x))
    return FusedRmsNorm::apply(x.contiguous(), std::nullopt, weight, epsilon, rounding,
                               gathered)[0];
  const auto wide = x.to(at::kFloat);
  const auto variance = wide.pow(2).mean(-1, /*keepdim=*/true);
  const auto normed = wide * at::rsqrt(variance + epsilon);
  switch (rounding) {
    case NormRounding::kBeforeWeight:
      break;
    case NormRounding::kOnce:
      return (weight * normed).to(x.scalar_type());
    case NormRounding::kOnceByOnePlus:
      return (normed * (1 + weight.to(at::kFloat))).to(x.scalar_type());
  }
  return weight * normed.to(x.scalar_type());
}

at::Tensor add_and_norm(ResidualStream& stream,
                        const at::Tensor& weight,
                        double epsilon,
                        NormRounding rounding) {
  if (stream.pending.defined() && is_fused(stream.sum)) {
    const auto results = FusedRmsNorm::apply(stream.sum, std::optional(stream.pending.contiguous()),
                                             weight, epsilon, rounding, /*gathered=*/false);
    stream = {.sum = results[1]};
    return results[0];
  }
  stream = {.sum = stream.total()};
  return rms_norm(stream.sum, weight, epsilon, rounding);
}

}  // namespace ferry::models
