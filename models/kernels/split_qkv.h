// Queries, keys and values out of what the fused projection gives. On a GPU one pass each, with the
// rotary embedding on the way, and a gradient that is written in place of three that are added.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "models/kernels/rotary.h"

namespace ferry::models {

// Of the queries of each group, those that are wanted.
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
// and keys are turned by `angles`, unless null. Differentiable.
QueryKeyValue split_qkv(const at::Tensor& mixed,
                        QueriesOfGroup queries,
                        const RotaryAngles* angles);

}  // namespace ferry::models
