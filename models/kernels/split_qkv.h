// Splits the output of the fused projection into queries, keys and values. A GPU does it in one
// pass, with the rotary embedding, and writes one gradient instead of adding three.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "models/kernels/rotary.h"
#include "models/kernels/rotary_cuda.h"

namespace ferry::models {

// The range of the queries of each group that is wanted.
struct QueriesOfGroup {
  std::int64_t first = 0;
  std::int64_t count = 0;
};

struct QueryKeyValue {
  at::Tensor query{};  // [tokens, groups * count, dim]
  at::Tensor key{};    // [tokens, groups, dim]
  at::Tensor value{};  // [tokens, groups, dim]; a view of `mixed` where no gradient is wanted
};

// mixed [tokens, groups, queries of a group + 2, dim]: queries, key, value of each group. Queries
// and keys are turned by `angles` unless it is null. Differentiable.
QueryKeyValue split_qkv(const at::Tensor& mixed,
                        QueriesOfGroup queries,
                        const RotaryAngles* angles);

// The same for heads that are normed before they turn (Qwen3), in one kernel of a GPU without
// gradients.
QueryKeyValue split_and_norm_qkv(const at::Tensor& mixed,
                                 QueriesOfGroup queries,
                                 const HeadNorms& norms,
                                 NormRounding rounding,
                                 const RotaryAngles* angles);

}  // namespace ferry::models
