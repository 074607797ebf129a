#include "models/transformer/recompute.h"

#include <ATen/core/custom_class.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "distckpt/base/error.h"

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

// Tensors of `to` see the memory of `from`, which is left without any.
void move_memory(const c10::Storage& from, const c10::Storage& to) {
  to.unsafeGetStorageImpl()->set_nbytes(from.nbytes());
  to.unsafeGetStorageImpl()->set_data_ptr_noswap(
      from.unsafeGetStorageImpl()->set_data_ptr(at::DataPtr(nullptr, to.device())));
  from.unsafeGetStorageImpl()->set_nbytes(0);
}

}  // namespace

std::vector<at::Tensor> recompute(const Computation& body, const std::vector<at::Tensor>& inputs) {
  const bool wanted =
      at::GradMode::is_enabled() &&
      std::ranges::any_of(inputs, [](const at::Tensor& x) { return x.requires_grad(); });
  return wanted ? Checkpoint::apply(body, at::TensorList(inputs)) : body(inputs);
}

void discard_output(const at::Tensor& output,
                    const at::Tensor& user,
                    std::function<at::Tensor()> again) {
  if (!user.requires_grad() || output.numel() == 0) return;
  struct Discarded {
    at::Tensor output;
    std::function<at::Tensor()> again;
  };
  // The hook drops all it holds when it has run: a node stays until the whole backward is over.
  user.register_hook([kept = std::make_shared<Discarded>(Discarded{output, std::move(again)})](
                         const at::Tensor& /*gradient*/) {
    const at::NoGradGuard no_grad;
    const auto discarded = std::exchange(*kept, {});
    const auto made = discarded.again();
    require(made.is_same_size(discarded.output) &&
                made.storage_offset() == discarded.output.storage_offset(),
            ErrorKind::kBug, "an output comes back in another shape");
    move_memory(made.storage(), discarded.output.storage());
  });
  move_memory(
      c10::Storage(c10::Storage::use_byte_size_t(), 0, at::DataPtr(nullptr, output.device())),
      output.storage());
}

}  // namespace ferry::models
