// RMSNorm in the formulas of Hugging Face: the variance and the product with its root in fp32,
// which is rounded and then multiplied by the weight (LlamaRMSNorm), or the other way round
// (GptOssRMSNorm; Gemma3RMSNorm adds 1 to the weight in fp32).
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>

#include "models/spec/transformer_config.h"

namespace ferry::models {

// x [..., channels], weight [channels] -> like x. Differentiable. `gathered`: the weight is no
// parameter but what a kernel of this step wrote, which must not be read before that one has ended.
at::Tensor rms_norm(const at::Tensor& x,
                    const at::Tensor& weight,
                    double epsilon,
                    NormRounding rounding = NormRounding::kBeforeWeight,
                    bool gathered = false);

// The residual stream between the layers. The next norm adds the pending summand, in one pass.
struct ResidualStream {
  at::Tensor sum{};      // [tokens, hidden]
  at::Tensor pending{};  // like sum; undefined: nothing

  at::Tensor total() const { return pending.defined() ? sum + pending : sum; }
};

// Adds the pending summand to stream.sum, and returns the norm of the sum, [tokens, hidden].
at::Tensor add_and_norm(ResidualStream& stream,
                        const at::Tensor& weight,
                        double epsilon,
                        NormRounding rounding = NormRounding::kBeforeWeight);

}  // namespace ferry::models
