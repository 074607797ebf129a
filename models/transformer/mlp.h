// The gated MLP, and the mixture of experts, as they lie in a layer.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "models/transformer/layer_context.h"

namespace ferry::models {

class FeedForward {
 public:
  virtual ~FeedForward() = default;

  // Of the norm of its input.
  virtual const at::Tensor& norm() const = 0;
  // normed [tokens, hidden], as it is between the layers -> the same. `choice`: of its experts.
  virtual at::Tensor forward(const at::Tensor& normed, const RouterChoice& choice) const = 0;
};

// fc2(silu(gate) * up), without a norm: a dense layer's, and the shared experts'.
class MLP {
 public:
  // `module`: "decoder.layers.3.mlp."
  MLP(const TensorParallel& parallel, Parameters& parameters, const std::string& module);

  at::Tensor forward(const at::Tensor& x) const;

 private:
  TensorParallel parallel_;
  ColumnParallelLinear fc1_;
  RowParallelLinear fc2_;
};

// Of a layer with or without experts. `prefix`: "decoder.layers.3.".
std::unique_ptr<FeedForward> make_feed_forward(const ModelSetup& setup,
                                               Parameters& parameters,
                                               const std::string& prefix,
                                               bool moe);

}  // namespace ferry::models
