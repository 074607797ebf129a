// One decoder layer: attention and a feed-forward network, each added to the residual stream.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "models/kernels/rms_norm.h"
#include "models/transformer/attention.h"
#include "models/transformer/mlp.h"

namespace ferry::models {

class TransformerLayer {
 public:
  // `prefix`: "decoder.layers.3.", `layer`: 3.
  TransformerLayer(const ModelSetup& setup,
                   Parameters& parameters,
                   const std::string& prefix,
                   std::int64_t layer,
                   bool moe);

  // Adds the outputs of attention and feed-forward network to the stream, whose tensors are
  // [tokens, hidden], as they are between the layers.
  ResidualStream forward(ResidualStream stream, const LayerContext& context) const;

 private:
  // The stream's sum with what is pending, normed if there is a norm for what modules read.
  at::Tensor pre_normed(ResidualStream& stream, const at::Tensor& weight) const;
  // Norms x, if there is a norm for what joins the stream, and multiplies by residual_multiplier.
  at::Tensor post_normed(const at::Tensor& x, const at::Tensor& weight) const;

  std::string prefix_;
  std::int64_t layer_;
  double epsilon_;
  NormRounding rounding_;
  double residual_multiplier_;
  bool feed_forward_recomputed_;
  std::unique_ptr<Attention> attention_;
  at::Tensor post_attention_norm_;  // [hidden]; undefined in most families
  std::shared_ptr<const FeedForward> feed_forward_;
  at::Tensor post_mlp_norm_;
};

// Multi-token prediction (DeepSeek-V3, section 2.2): computes, from the hidden state of a token and
// the embedding of the next one, the hidden state that predicts the token after that.
class MultiTokenPredictionLayer {
 public:
  MultiTokenPredictionLayer(const ModelSetup& setup, Parameters& parameters, std::int64_t index);

  // hidden, next_embedding [tokens, hidden], as they are between the layers -> the same, normed for
  // the output layer.
  at::Tensor forward(const at::Tensor& hidden,
                     const at::Tensor& next_embedding,
                     const LayerContext& context) const;

 private:
  const ModelSetup& setup_;
  at::Tensor enorm_, hnorm_;
  ColumnParallelLinear eh_proj_;
  TransformerLayer layer_;
  at::Tensor final_norm_;
};

}  // namespace ferry::models
