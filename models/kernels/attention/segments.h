// What attention on the host and on a GPU do alike with the segments of a pack: which of them have
// queries, rows laid out head by head, and results put where their queries were.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "distckpt/base/integers.h"
#include "models/kernels/attention/attention.h"

namespace ferry::models {

using distckpt::round_up;

// Throws Error(kBug) unless they ascend, each with at least as many keys as queries.
std::vector<AttentionSegment> with_queries(const std::vector<AttentionSegment>& segments);

// [rows, heads, dim] -> [heads, front + rows + back, dim], zeros around.
at::Tensor by_heads(const at::Tensor& rows, std::int64_t front, std::int64_t back);

// The rows of all segments, one behind another -> [num_rows, ...], zeros between.
at::Tensor at_their_places(const at::Tensor& rows,
                           const std::vector<AttentionSegment>& segments,
                           std::int64_t num_rows);

}  // namespace ferry::models
