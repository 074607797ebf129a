// Attention: grouped queries, whose results a gate may scale (Qwen3-Next), multi-latent (DeepSeek),
// or linear, by a gated delta net. Tensor parallel ranks hold different heads; context parallel
// ranks gather keys and values, or exchange tokens for heads (delta nets).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "models/transformer/layer_context.h"

namespace ferry::models {

class Attention {
 public:
  virtual ~Attention() = default;

  // The weight of the norm of its input, [hidden]; undefined where the input is not normed.
  virtual const at::Tensor& norm() const = 0;
  // normed [tokens, hidden], as it is between the layers -> the same.
  virtual at::Tensor forward(const at::Tensor& normed, const LayerContext& context) const = 0;
};

// `prefix`: "decoder.layers.3.". `layer`: 3, by which generation finds its keys and values.
std::unique_ptr<Attention> make_attention(const ModelSetup& setup,
                                          Parameters& parameters,
                                          const std::string& prefix,
                                          std::int64_t layer);

}  // namespace ferry::models
