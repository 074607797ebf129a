#include "models/kernels/swiglu.h"

#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/custom_function.h>

#include "models/kernels/swiglu_cuda.h"
#include "models/kernels/whole_vectors.h"

namespace ferry::models {
namespace {

class FusedSwiGLU : public torch::autograd::Function<FusedSwiGLU> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& gate_up) {
    context->save_for_backward({gate_up});
    return swiglu_cuda(gate_up);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    return {swiglu_backward_cuda(grads[0].contiguous(), context->get_saved_variables()[0])};
  }
};

}  // namespace

at::Tensor swiglu(const at::Tensor& gate_up) {
  if (gate_up.is_cuda()) return FusedSwiGLU::apply(gate_up.contiguous());
  const auto halves = gate_up.chunk(2, -1);
  return models::silu(halves[0]) * halves[1];
}

}  // namespace ferry::models
