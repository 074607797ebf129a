#include "models/transformer/recompute.h"

#include <ATen/core/custom_class.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <utility>

namespace ferry::models {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Kept : torch::CustomClassHolder {
  explicit Kept(Computation computation) : body(std::move(computation)) {}
  Computation body;
};

class Checkpoint : public torch::autograd::Function<Checkpoint> {
 public:
  static variable_list forward(AutogradContext* context,
                               const Computation& body,
                               at::TensorList inputs) {
    context->saved_data["body"] = c10::IValue::make_capsule(c10::make_intrusive<Kept>(body));
    context->save_for_backward(inputs.vec());
    context->set_materialize_grads(false);
    return body(inputs.vec());
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const auto kept =
        c10::static_intrusive_pointer_cast<Kept>(context->saved_data["body"].toCapsule());
    variable_list inputs;
    for (const auto& tensor : saved)
      inputs.push_back(tensor.detach().requires_grad_(tensor.requires_grad()));
    variable_list outputs;
    {
      const at::AutoGradMode grad(true);
      outputs = kept->body(inputs);
    }
    variable_list reached;
    variable_list of_reached;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (!grads[i].defined() || !outputs[i].requires_grad()) continue;
      reached.push_back(outputs[i]);
      of_reached.push_back(grads[i]);
    }
    if (!reached.empty()) torch::autograd::backward(reached, of_reached);
    variable_list result{at::Tensor()};  // of the body
    for (const auto& input : inputs) result.push_back(input.grad());
    return result;
  }
};

}  // namespace

std::vector<at::Tensor> recompute(const Computation& body, const std::vector<at::Tensor>& inputs) {
  const bool wanted =
      at::GradMode::is_enabled() &&
      std::ranges::any_of(inputs, [](const at::Tensor& x) { return x.requires_grad(); });
  return wanted ? Checkpoint::apply(body, at::TensorList(inputs)) : body(inputs);
}

}  // namespace ferry::models
