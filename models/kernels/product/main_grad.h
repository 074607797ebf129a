// The buffer in which the trainer accumulates a parameter's gradient over micro-batches
// (Megatron-Core's main_grad). A product may add the gradient of its weight to it directly, in
// fp32, instead of handing it to autograd (gradient_accumulation_fusion).
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace ferry::models {

// Set as a leaf's post-accumulate hook (torch::autograd::impl::set_post_acc_grad_hooks): autograd
// calls it after each backward pass. The leaf's grad() is undefined if a product has added the
// gradient to main_grad() already.
class MainGradHook : public torch::autograd::PostAccumulateGradHook {
 public:
  virtual at::Tensor main_grad() const = 0;  // of the leaf's shape
};

// The hook of a leaf; null if it has none.
inline MainGradHook* main_grad_hook(const at::Tensor& leaf) {
  if (!leaf.requires_grad() || !leaf.is_leaf()) return nullptr;
  return dynamic_cast<MainGradHook*>(torch::autograd::impl::post_acc_grad_hooks(leaf).get());
}

}  // namespace ferry::models
