// What attention asks in generation (Megatron-Core's inference_context): where the keys and values
// of earlier tokens are kept, and which sequence each row belongs to. The engine of rollout/
// answers.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "models/kernels/attention.h"
#include "models/kernels/latent_attention.h"

namespace ferry::models {

class InferenceContext {
 public:
  virtual ~InferenceContext() = default;

  // Keeps the keys and values of this step's rows in the cache of `layer`, then attends each row to
  // its own sequence so far. query [rows, heads, dim], key [rows, groups, dim], value [rows,
  // groups, value_dim] -> [rows, heads, value_dim].
  virtual at::Tensor attend(std::int64_t layer,
                            const at::Tensor& query,
                            const at::Tensor& key,
                            const at::Tensor& value,
                            const AttentionOptions& options) = 0;

  // The same of multi-latent attention that keeps a token's latent and the rotated part of its key,
  // `latents` [rows, rank + rotated]. query [rows, heads, key_dim + rotated] -> [rows, heads,
  // value_dim].
  virtual at::Tensor attend_latents(std::int64_t layer,
                                    const at::Tensor& query,
                                    const at::Tensor& latents,
                                    const LatentUpProjection& up,
                                    const AttentionOptions& options) = 0;
};

}  // namespace ferry::models
