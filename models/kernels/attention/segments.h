// Helpers that attention on the host and on a GPU share: the segments that have queries, rows laid
// out head by head, and results put in the rows of their queries.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "distckpt/base/integers.h"
#include "models/kernels/attention/attention.h"

namespace ferry::models {

using distckpt::round_up;

// The segments that have queries. Throws Error(kBug) unless segments ascend, each with at least as
// many keys as queries.
std::vector<AttentionSegment> with_queries(const std::vector<AttentionSegment>& segments);

// Puts the rows of all segments, one segment after another, in the rows of their queries ->
// [num_rows, ...], zeros elsewhere.
at::Tensor at_their_places(const at::Tensor& rows,
                           const std::vector<AttentionSegment>& segments,
                           std::int64_t num_rows);

}  // namespace ferry::models
