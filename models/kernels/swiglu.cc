#include "models/kernels/swiglu.h"

#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/custom_function.h>

#include "distckpt/base/error.h"
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

class PlusExpertBiases : public torch::autograd::Function<PlusExpertBiases> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& rows,
                            const at::Tensor& biases,
                            const at::Tensor& ends) {
    context->save_for_backward({ends});
    return add_expert_biases_cuda(rows, {.values = biases, .ends = ends});
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    return {grads[0], sum_expert_rows_cuda(grads[0], context->get_saved_variables()[0]),
            at::Tensor()};
  }
};

class FusedQuickGeglu : public torch::autograd::Function<FusedQuickGeglu> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& gate_up,
                            const at::Tensor& biases,
                            const at::Tensor& ends,
                            const QuickGeglu& options) {
    context->save_for_backward({gate_up, biases, ends});
    context->saved_data["clamp"] = options.clamp;
    context->saved_data["offset"] = options.offset;
    return quick_geglu_cuda(gate_up, {.values = biases, .ends = ends}, options);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const auto& ends = saved[2];
    const auto grad =
        quick_geglu_backward_cuda(grads[0], saved[0], {.values = saved[1], .ends = ends},
                                  {.clamp = context->saved_data["clamp"].toOptional<double>(),
                                   .offset = context->saved_data["offset"].toDouble()});
    return {grad, sum_expert_rows_cuda(grad, ends), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor swiglu(const at::Tensor& gate_up) {
  if (gate_up.is_cuda()) return FusedSwiGLU::apply(gate_up.contiguous());
  const auto halves = gate_up.chunk(2, -1);
  return models::silu(halves[0]) * halves[1];
}

at::Tensor geglu(const at::Tensor& gate_up) {
  const auto halves = gate_up.chunk(2, -1);
  return models::gelu_tanh(halves[0]) * halves[1];
}

GatedActivation gated_activation(Activation activation) {
  if (activation == Activation::kSilu) return swiglu;
  if (activation == Activation::kGeluTanh) return geglu;
  fail(ErrorKind::kLayout, "the activation {} is not known to gated layers", name_of(activation));
}

at::Tensor quick_geglu(const at::Tensor& gate_up, const QuickGeglu& options) {
  constexpr double kAlpha = 1.702;
  const auto halves = gate_up.chunk(2, -1);
  const auto gate = options.clamp ? halves[0].clamp_max(*options.clamp) : halves[0];
  const auto up = options.clamp ? halves[1].clamp(-*options.clamp, *options.clamp) : halves[1];
  return (up + options.offset) * (gate * models::sigmoid(gate * kAlpha));
}

at::Tensor add_expert_biases(const at::Tensor& rows, const ExpertBiases& biases) {
  return PlusExpertBiases::apply(rows, biases.values, biases.ends);
}

at::Tensor quick_geglu(const at::Tensor& gate_up,
                       const ExpertBiases& biases,
                       const QuickGeglu& options) {
  return FusedQuickGeglu::apply(gate_up, biases.values, biases.ends, options);
}

}  // namespace ferry::models
