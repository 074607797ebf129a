// Gated activations with the roundings of Hugging Face, one for each operation.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "models/spec/model_settings.h"

namespace ferry::models {

// silu(gate) * up: [rows, 2 * ffn], gate beside up -> [rows, ffn]. Differentiable.
at::Tensor swiglu(const at::Tensor& gate_up);

// gelu(gate) * up, with the approximation of gelu by tanh, on the same.
at::Tensor geglu(const at::Tensor& gate_up);

// The one of both that has this activation. Throws Error(kLayout) for another one.
using GatedActivation = at::Tensor (*)(const at::Tensor& gate_up);
GatedActivation gated_activation(Activation activation);

// GPT-OSS's, on the same: (up + offset) * gate * sigmoid(1.702 gate), with gate at most `clamp` and
// up at most that far from 0.
struct QuickGeglu {
  std::optional<double> clamp{};
  double offset = 0.0;
};
at::Tensor quick_geglu(const at::Tensor& gate_up, const QuickGeglu& options);

// A bias for each expert, whose rows end at `ends`.
struct ExpertBiases {
  at::Tensor values{};  // [experts, columns]
  at::Tensor ends{};    // [experts], int32
};
// rows [rows, columns] on a GPU + their expert's bias; rows behind the last end get the last
// expert's, which counts no gradient of theirs. Differentiable.
at::Tensor add_expert_biases(const at::Tensor& rows, const ExpertBiases& biases);
// quick_geglu() of that sum in one kernel. Differentiable.
at::Tensor quick_geglu(const at::Tensor& gate_up,
                       const ExpertBiases& biases,
                       const QuickGeglu& options);

}  // namespace ferry::models
