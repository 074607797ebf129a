// The output layer fused with the log-probabilities, entropies and losses of its logits
// (Megatron-Core tensor_parallel/cross_entropy.py, and the fused linear cross-entropy of verl and
// Liger-Kernel): logits exist for one chunk of tokens at a time, forward and backward, and each
// rank has those of its part of the vocabulary.
//
// Chunks are of tokens, never of the vocabulary, so that in kBitwise, where ranks gather the rows
// of a chunk, a log-probability is a function of its row of logits alone. In kFast ranks exchange
// four numbers a row instead.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "models/kernels/log_probs.h"
#include "models/spec/costs.h"
#include "models/tensor_parallel/layers.h"

namespace ferry::models {

// The output layer: logits = hidden weight^T / logits_scaling. Each tp rank holds its rows of the
// weight, [padded vocabulary/tp, hidden], in the order of the ranks.
struct OutputHead {
  at::Tensor weight{};
  std::int64_t vocab_size = 0;  // without padding
  double logits_scaling = 1.0;
  std::optional<double> softcap{};  // c: logits become c * tanh(logit / c)
  TensorParallel parallel{};
  std::int64_t chunk_tokens = kLogitsTokens;
};

struct TokenLogProbs {
  at::Tensor log_probs{};  // [tokens], fp32, of the labels
  at::Tensor entropy{};    // [tokens], fp32, of each row's distribution
};

// hidden [tokens, hidden], as TensorParallel::enter() gives it; labels [tokens], int64. The logits
// are divided by `temperature`, and tokens that the mask leaves out have probability 0. Both
// results are differentiable; the backward computes the logits of a chunk again.
TokenLogProbs linear_log_probs(const at::Tensor& hidden,
                               const at::Tensor& labels,
                               const OutputHead& head,
                               double temperature = 1,
                               const SamplingMask& mask = {});

struct CrossEntropy {
  at::Tensor loss{};       // scalar, fp32: - sum of weight * log_prob, differentiable
  at::Tensor log_probs{};  // [tokens], fp32, for metrics
};

// The weighted cross-entropy, with token_weights [tokens], fp32. It is linear in the
// log-probabilities, so the gradient is made with the loss, and the logits are computed once.
CrossEntropy linear_cross_entropy(const at::Tensor& hidden,
                                  const at::Tensor& labels,
                                  const at::Tensor& token_weights,
                                  const OutputHead& head);

}  // namespace ferry::models
