#include "models/kernels/attention/latent_attention.h"

#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>

namespace ferry::models {

at::Tensor absorb_query(const at::Tensor& query, const LatentUpProjection& up) {
  const auto unrotated = query.narrow(2, 0, up.key_dim).transpose(0, 1);  // [heads, rows, key_dim]
  const auto absorbed = at::bmm(unrotated, up.weight.narrow(1, 0, up.key_dim)).transpose(0, 1);
  return at::cat({absorbed, query.narrow(2, up.key_dim, query.size(2) - up.key_dim)}, 2);
}

at::Tensor project_values(const at::Tensor& attended, const LatentUpProjection& up) {
  const auto weight = up.weight.narrow(1, up.key_dim, up.weight.size(1) - up.key_dim);
  return at::bmm(attended.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1);
}

ExpandedKeys expand_latents(const at::Tensor& latents, const LatentUpProjection& up) {
  const auto heads = up.weight.size(0);
  const auto rotated = latents.size(1) - up.rank();
  const auto both = at::linear(latents.narrow(1, 0, up.rank()), up.weight.flatten(0, 1))
                        .view({latents.size(0), heads, up.weight.size(1)});
  const auto turned =
      latents.narrow(1, up.rank(), rotated).unsqueeze(1).expand({latents.size(0), heads, rotated});
  return {.key = at::cat({both.narrow(2, 0, up.key_dim), turned}, 2),
          .value = both.narrow(2, up.key_dim, up.weight.size(1) - up.key_dim).contiguous()};
}

}  // namespace ferry::models
