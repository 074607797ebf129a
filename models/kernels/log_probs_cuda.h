// score_rows and logits_to_gradient on a GPU: together they read the logits twice and write them
// once.
#pragma once

#include <ATen/core/Tensor.h>

#include "models/kernels/log_probs.h"

namespace ferry::models {

ScoredRows score_rows_cuda(const at::Tensor& logits,
                           const at::Tensor& labels,
                           VocabularyRange range,
                           double temperature);

void logits_to_gradient_cuda(at::Tensor& logits,
                             const at::Tensor& statistics,
                             const at::Tensor& labels,
                             const at::Tensor& of_log_prob,
                             const at::Tensor& of_entropy,
                             VocabularyRange range,
                             double temperature);

}  // namespace ferry::models
