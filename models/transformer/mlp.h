// The feed-forward network of a layer: a gated MLP or a mixture of experts.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "models/kernels/swiglu.h"
#include "models/transformer/layer_context.h"

namespace ferry::models {

class FeedForward {
 public:
  virtual ~FeedForward() = default;

  // The weight of the norm of its input, [hidden].
  virtual const at::Tensor& norm() const = 0;
  // normed [tokens, hidden], as it is between the layers -> the same. `choice` is read by layers
  // with experts.
  virtual at::Tensor forward(const at::Tensor& normed, const RouterChoice& choice) const = 0;
  // The same in generation, without gradients.
  virtual at::Tensor generate(const at::Tensor& normed,
                              const RouterChoice& choice,
                              const InferenceContext&) const {
    return forward(normed, choice);
  }
};

// fc2(activation(gate) * up), without a norm, for dense layers and for shared experts.
class MLP {
 public:
  // `module`: "decoder.layers.3.mlp."
  MLP(const ModelSetup& setup, Parameters& parameters, const std::string& module);

  at::Tensor forward(const at::Tensor& x) const;

 private:
  TensorParallel parallel_;
  GatedActivation activation_;
  ColumnParallelLinear fc1_;
  RowParallelLinear fc2_;
};

// Makes the feed-forward network of a layer, with experts if `moe`. `prefix`: "decoder.layers.3.".
std::unique_ptr<FeedForward> make_feed_forward(const ModelSetup& setup,
                                               Parameters& parameters,
                                               const std::string& prefix,
                                               bool moe);

}  // namespace ferry::models
