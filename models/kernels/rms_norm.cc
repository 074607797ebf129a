#include "models/kernels/rms_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/rsqrt.h>
#include <torch/csrc/autograd/custom_function.h>

#include "models/kernels/rms_norm_cuda.h"

namespace ferry::models {
namespace {

class FusedRmsNorm : public torch::autograd::Function<FusedRmsNorm> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& x,
                            const at::Tensor& weight,
                            double epsilon) {
    const auto result = rms_norm_cuda(x, weight, epsilon);
    context->save_for_backward({x, weight, result.inverse_rms});
    return result.y;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const auto [of_x, of_weight] =
        rms_norm_backward_cuda(grads[0].contiguous(), saved[0], saved[1], saved[2]);
    return {of_x, of_weight, at::Tensor()};
  }
};

}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double epsilon) {
  if (x.is_cuda() && rms_norm_cuda_supports(x.size(-1)))
    return FusedRmsNorm::apply(x.contiguous(), weight, epsilon);
  const auto wide = x.to(at::kFloat);
  const auto variance = wide.pow(2).mean(-1, /*keepdim=*/true);
  return weight * (wide * at::rsqrt(variance + epsilon)).to(x.scalar_type());
}

}  // namespace ferry::models
