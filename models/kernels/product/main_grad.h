// Where a parameter's gradient accumulates over micro-batches (Megatron-Core's main_grad), if the
// trainer has a place for it: a product may then add the gradient of its weight there at once, in
// fp32, instead of handing it to autograd (gradient_accumulation_fusion).
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace ferry::models {

// Set as a leaf's post-accumulate hook (torch::autograd::impl::set_post_acc_grad_hooks): autograd
// calls it after each backward pass, with a leaf whose grad() is undefined if a product has added
// it.
class MainGradHook : public torch::autograd::PostAccumulateGradHook {
 public:
  virtual at::Tensor main_grad() const = 0;  // of the leaf's shape
};

// Null if the leaf has none.
inline MainGradHook* main_grad_hook(const at::Tensor& leaf) {
  if (!leaf.requires_grad() || !leaf.is_leaf()) return nullptr;
  return dynamic_cast<MainGradHook*>(torch::autograd::impl::post_acc_grad_hooks(leaf).get());
}

}  // namespace ferry::models
