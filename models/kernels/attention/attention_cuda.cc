#include "models/kernels/attention/attention_cuda.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>

#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"
#include "models/kernels/attention/attention_calls.h"
#include "models/kernels/attention/segments.h"

namespace ferry::models {
namespace {

// A plan of cuDNN's serves one shape and takes 40 ms to make.
constexpr std::int64_t kLengthStep = 128;
// Flash chooses a kernel with other bits for a single query row.
constexpr std::int64_t kFewestRows = 2;

// The copy is from pinned memory, so that the host does not wait for the device.
at::Tensor offsets(const std::vector<std::int32_t>& lengths, at::Device device) {
  const auto sums = at::empty({static_cast<std::int64_t>(lengths.size()) + 1},
                              at::TensorOptions(at::kInt).pinned_memory(true));
  auto* const values = sums.mutable_data_ptr<std::int32_t>();
  values[0] = 0;
  std::partial_sum(lengths.begin(), lengths.end(), values + 1);
  return sums.to(device, /*non_blocking=*/true);
}

// x.narrow() without a node in autograd's graph where that is all of x.
at::Tensor rows_of(const at::Tensor& x, std::int64_t begin, std::int64_t size) {
  return begin == 0 && size == x.size(0) ? x : x.narrow(0, begin, size);
}

// The rows of all ranges, one after the other; a view if they are contiguous already.
struct KeyRange {
  std::int64_t begin = 0;
  std::int64_t size = 0;
};
at::Tensor gather(const at::Tensor& rows, const std::vector<KeyRange>& ranges) {
  bool adjacent = true;
  std::int64_t end = ranges.front().begin;
  for (const auto& range : ranges) {
    adjacent = adjacent && range.begin == end;
    end = range.begin + range.size;
  }
  if (adjacent) return rows_of(rows, ranges.front().begin, end - ranges.front().begin);
  std::vector<at::Tensor> parts;
  for (const auto& range : ranges) parts.push_back(rows.narrow(0, range.begin, range.size));
  return at::cat(parts);
}

AttentionCall call_of(const AttentionOptions& options) {
  return {.scale = options.scale,
          .window = options.window,
          .deterministic = options.deterministic || options.alignment == Alignment::kBitwise,
          .alignment = options.alignment};
}

at::Tensor flash(const at::Tensor& query,
                 const at::Tensor& key,
                 const at::Tensor& value,
                 const std::vector<AttentionSegment>& segments,
                 const AttentionOptions& options) {
  std::vector<std::int32_t> rows;
  std::vector<std::int32_t> keys;
  std::vector<KeyRange> row_ranges;
  std::vector<KeyRange> key_ranges;
  for (const auto& segment : segments) {
    rows.push_back(static_cast<std::int32_t>(segment.num_queries));
    keys.push_back(static_cast<std::int32_t>(segment.num_keys));
    row_ranges.push_back({segment.query_begin, segment.num_queries});
    key_ranges.push_back({segment.key_begin, segment.num_keys});
  }
  const auto most_rows = std::max<std::int64_t>(*std::ranges::max_element(rows), kFewestRows);
  const RowsOfSequences of_queries{.begin = offsets(rows, query.device()), .longest = most_rows};
  const RowsOfSequences of_keys{
      .begin = rows == keys ? of_queries.begin : offsets(keys, query.device()),
      .longest = *std::ranges::max_element(keys)};
  const auto q = gather(query, row_ranges);
  const auto k = gather(key, key_ranges);
  auto v = gather(value, key_ranges);
  if (options.sinks.defined())
    return sink_attention(q, k, v, options.sinks, of_queries, of_keys, call_of(options));
  // Values of latent attention, as transformers' flash_attention_forward() pads them.
  const auto width = v.size(2);
  if (width < k.size(2)) v = at::constant_pad_nd(v, {0, k.size(2) - width});
  const auto result = flash_attention(q, k, v, of_queries, of_keys, call_of(options));
  return width < k.size(2) ? result.narrow(2, 0, width) : result;
}

// The common length of all sequences, if they are whole, lie one after another and have the same
// length, as in packs of pre-training: then cuDNN needs one plan.
std::optional<std::int64_t> common_length(const std::vector<AttentionSegment>& segments) {
  const auto length = segments.front().num_keys;
  if (length % kLengthStep != 0) return std::nullopt;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const auto begin = segments.front().query_begin + static_cast<std::int64_t>(i) * length;
    if (segments[i] != AttentionSegment{begin, length, begin, length}) return std::nullopt;
  }
  return length;
}

// All segments at once, on Hopper at twice the rate of flash.
at::Tensor cudnn_batch(const at::Tensor& query,
                       const at::Tensor& key,
                       const at::Tensor& value,
                       const std::vector<AttentionSegment>& segments,
                       std::int64_t length,
                       const AttentionOptions& options) {
  const auto sequences = static_cast<std::int64_t>(segments.size());
  const auto batch = [&](const at::Tensor& x) {
    return rows_of(x, segments.front().query_begin, sequences * length)
        .view({sequences, length, x.size(1), x.size(2)})
        .transpose(1, 2);
  };
  return cudnn_attention(batch(query), batch(key), batch(value), call_of(options))
      .transpose(1, 2)
      .reshape({sequences * length, query.size(1), value.size(2)});
}

}  // namespace

at::Tensor attention_cuda(const at::Tensor& query,
                          const at::Tensor& key,
                          const at::Tensor& value,
                          const std::vector<AttentionSegment>& all_segments,
                          const AttentionOptions& options) {
  require(query.scalar_type() == at::kBFloat16, ErrorKind::kLayout,
          "attention on a GPU takes bf16");
  require(query.size(2) % 8 == 0 && value.size(2) % 8 == 0, ErrorKind::kLayout,
          "attention on a GPU takes heads of a multiple of 8 channels, not of {} and {}",
          query.size(2), value.size(2));
  const auto segments = with_queries(all_segments);
  if (segments.empty())
    return at::zeros({query.size(0), query.size(1), value.size(2)}, query.options());
  const auto length =
      options.alignment == Alignment::kFast && !options.window && !options.sinks.defined()
          ? common_length(segments)
          : std::nullopt;
  // The rows of all segments, without the gaps.
  const auto rows = length ? cudnn_batch(query, key, value, segments, *length, options)
                           : flash(query, key, value, segments, options);
  return at_their_places(rows, segments, query.size(0));
}

}  // namespace ferry::models
