#include "models/kernels/attention/eager_attention_cuda.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAGuard.h>

#include "distckpt/base/error.h"
#include "models/kernels/cuda/cuda_call.h"
#include "models/kernels/cuda/cuda_launch.h"

namespace ferry::models {
namespace {

// The arguments that do not depend on where the keys lie.
launch::EagerAttention eager_arguments(const at::Tensor& query,
                                       const at::Tensor& key,
                                       const at::Tensor& value,
                                       const at::Tensor& sinks,
                                       double scale,
                                       std::optional<std::int64_t> window) {
  require(paged_attention_cuda_supports(query.device(), query.scalar_type(), query.size(2),
                                        value.size(-1)) &&
              sinks.scalar_type() == at::kBFloat16 && sinks.size(0) == query.size(1) &&
              query.is_contiguous() && key.is_contiguous() && value.is_contiguous() &&
              sinks.is_contiguous(),
          ErrorKind::kBug, "attention with sinks of another form than its kernel knows");
  return {.query = query.const_data_ptr(),
          .key = key.const_data_ptr(),
          .value = value.const_data_ptr(),
          .sinks = sinks.const_data_ptr(),
          .queries = query.size(0),
          .shape = {.heads = static_cast<int>(query.size(1)),
                    .groups = static_cast<int>(key.size(-2)),
                    .dim = static_cast<int>(query.size(2)),
                    .window = static_cast<int>(window.value_or(0)),
                    .scale = static_cast<float>(scale)}};
}

}  // namespace

EagerAttentionResult eager_attention_cuda(const at::Tensor& query,
                                          const at::Tensor& key,
                                          const at::Tensor& value,
                                          const at::Tensor& sinks,
                                          const RowsOfSequences& queries,
                                          const RowsOfSequences& keys,
                                          const AttentionCall& call) {
  const c10::cuda::CUDAGuard device(query.device());
  const auto q = query.contiguous();
  const auto k = key.contiguous();
  const auto v = value.contiguous();
  const auto of_heads = sinks.contiguous();
  EagerAttentionResult result{
      .rows = at::empty_like(q),
      .log_sum = at::empty({q.size(1), q.size(0)}, q.options().dtype(at::kFloat))};
  auto arguments = eager_arguments(q, k, v, of_heads, call.scale, call.window);
  arguments.query_begin = queries.begin.const_data_ptr<std::int32_t>();
  arguments.key_begin = keys.begin.const_data_ptr<std::int32_t>();
  arguments.result = result.rows.mutable_data_ptr();
  arguments.log_sum = result.log_sum.mutable_data_ptr<float>();
  arguments.longest_query = static_cast<int>(queries.longest);
  arguments.shape.sequences = static_cast<int>(queries.begin.size(0) - 1);
  check(launch::eager_attention(arguments, stream()));
  return result;
}

at::Tensor eager_paged_attention_cuda(const at::Tensor& query,
                                      const PagedKeys& keys,
                                      const AttentionOptions& options) {
  const c10::cuda::CUDAGuard device(query.device());
  const auto sinks = options.sinks.contiguous();
  auto rows = at::empty_like(query);
  auto arguments =
      eager_arguments(query, keys.key, keys.value, sinks, options.scale, options.window);
  arguments.block_tables = keys.block_tables.const_data_ptr<std::int32_t>();
  arguments.lengths = keys.lengths.const_data_ptr<std::int32_t>();
  arguments.result = rows.mutable_data_ptr();
  arguments.shape.sequences = static_cast<int>(query.size(0));
  arguments.shape.max_blocks = static_cast<int>(keys.block_tables.stride(0));
  check(launch::eager_attention(arguments, stream()));
  return rows;
}

}  // namespace ferry::models
