#include "models/kernels/attention/segments.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>

#include "distckpt/base/error.h"

namespace ferry::models {

std::vector<AttentionSegment> with_queries(const std::vector<AttentionSegment>& segments) {
  std::vector<AttentionSegment> found;
  std::int64_t end = 0;
  for (const auto& segment : segments) {
    if (segment.num_queries == 0) continue;
    require(segment.query_begin >= end && segment.num_keys >= segment.num_queries, ErrorKind::kBug,
            "segments of queries have to ascend, with all keys behind them");
    end = segment.query_begin + segment.num_queries;
    found.push_back(segment);
  }
  return found;
}

at::Tensor at_their_places(const at::Tensor& rows,
                           const std::vector<AttentionSegment>& segments,
                           std::int64_t num_rows) {
  if (rows.size(0) == num_rows) return rows;
  std::vector<at::Tensor> parts;
  std::int64_t written = 0;
  std::int64_t taken = 0;
  const auto fill_to = [&](std::int64_t row) {
    if (row > written) {
      auto shape = rows.sizes().vec();
      shape[0] = row - written;
      parts.push_back(rows.new_zeros(shape));
    }
    written = row;
  };
  for (const auto& segment : segments) {
    fill_to(segment.query_begin);
    parts.push_back(rows.narrow(0, taken, segment.num_queries));
    taken += segment.num_queries;
    written += segment.num_queries;
  }
  fill_to(num_rows);
  return at::cat(parts);
}

}  // namespace ferry::models
