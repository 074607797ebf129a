// Multi-latent attention with a compressed cache (DeepSeek-V2, arXiv 2405.04434, 2.1.2): the cache
// keeps c^KV and the rotated part of the key of each token, for all heads together. The
// up-projections are absorbed into the query and the result: q^T (W^UK c) = (W^UK^T q)^T c, and
// sum_t a_t W^UV c_t = W^UV sum_t a_t c_t. Equal to attention with expanded keys and values but for
// roundings.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace ferry::models {

// linear_kv_up_proj of this rank's heads.
struct LatentUpProjection {
  at::Tensor weight{};       // [heads, key_dim + value_dim, rank]: W^UK, W^UV of each head
  std::int64_t key_dim = 0;  // channels of a key without the rotated ones

  std::int64_t rank() const { return weight.size(2); }
};

// query [rows, heads, key_dim + rotated] -> [rows, heads, rank + rotated]: over latents.
at::Tensor absorb_query(const at::Tensor& query, const LatentUpProjection& up);
// Projects the result of attention over latents, [rows, heads, rank] -> [rows, heads, value_dim].
at::Tensor project_values(const at::Tensor& attended, const LatentUpProjection& up);

struct ExpandedKeys {
  at::Tensor key{};    // [keys, heads, key_dim + rotated]
  at::Tensor value{};  // [keys, heads, value_dim]
};
// Expands latents [keys, rank + rotated] to the keys and values of all heads.
ExpandedKeys expand_latents(const at::Tensor& latents, const LatentUpProjection& up);

}  // namespace ferry::models
