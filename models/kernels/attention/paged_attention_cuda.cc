#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>

#include "distckpt/base/error.h"
#include "models/kernels/attention/eager_attention_cuda.h"
#include "models/kernels/attention/paged_attention.h"
#include "models/kernels/cuda/cuda_call.h"
#include "models/kernels/cuda/cuda_launch.h"
#include "models/spec/costs.h"

namespace ferry::models {
namespace {

constexpr std::int64_t kLatent = 512;  // that the kernel knows
constexpr std::int64_t kRotated = 64;

bool are_latents(const PagedKeys& keys) {
  return keys.value.is_alias_of(keys.key);
}

}  // namespace

bool paged_attention_cuda_supports(at::Device device,
                                   at::ScalarType dtype,
                                   std::int64_t dim,
                                   std::int64_t value_dim) {
  const bool latents = dim == kLatent + kRotated && value_dim == 0;
  const bool heads = ((dim == 64 || dim == 128 || dim == 256) && value_dim == dim) ||
                     (dim == 192 && value_dim == 128);
  return device.is_cuda() && dtype == at::kBFloat16 && (latents || heads);
}

at::Tensor paged_attention_cuda(const at::Tensor& query,
                                const PagedKeys& keys,
                                const AttentionOptions& options) {
  const bool latents = are_latents(keys);
  require(paged_attention_cuda_supports(query.device(), query.scalar_type(), query.size(2),
                                        latents ? 0 : keys.value.size(3)) &&
              query.is_contiguous() && keys.key.is_contiguous() &&
              (latents || keys.value.is_contiguous()) && keys.key.size(1) == kCacheBlockTokens &&
              keys.block_tables.stride(1) == 1,
          ErrorKind::kBug, "attention to keys in blocks of another form than its kernel knows");
  require(!latents || (keys.value.size(3) == kLatent && keys.key.size(2) == 1 &&
                       !options.sinks.defined() && !options.window),
          ErrorKind::kBug, "latents are those of one group, without sinks and windows");
  if (options.sinks.defined() && options.alignment == Alignment::kBitwise)
    return eager_paged_attention_cuda(query, keys, options);
  const c10::cuda::CUDAGuard device(query.device());
  const auto sinks =
      options.sinks.defined() ? options.sinks.to(query.scalar_type()).contiguous() : options.sinks;
  auto result = at::empty({query.size(0), query.size(1), keys.value.size(3)}, query.options());
  check(launch::paged_attention(
      query.const_data_ptr(), keys.key.const_data_ptr(), keys.value.const_data_ptr(),
      keys.block_tables.const_data_ptr<std::int32_t>(), keys.lengths.const_data_ptr<std::int32_t>(),
      sinks.defined() ? sinks.const_data_ptr() : nullptr, result.mutable_data_ptr(),
      {.sequences = static_cast<int>(query.size(0)),
       .heads = static_cast<int>(query.size(1)),
       .groups = static_cast<int>(keys.key.size(2)),
       .dim = static_cast<int>(query.size(2)),
       .max_blocks = static_cast<int>(keys.block_tables.stride(0)),
       .window = static_cast<int>(options.window.value_or(0)),
       .scale = static_cast<float>(options.scale),
       .in_order = options.alignment == Alignment::kBitwise},
      stream()));
  return result;
}

void store_in_slots_cuda(const at::Tensor& key,
                         const at::Tensor& value,
                         const at::Tensor& slots,
                         const at::Tensor& key_cache,
                         const at::Tensor& value_cache) {
  constexpr std::int64_t kUnit = 16;
  const c10::cuda::CUDAGuard device(key.device());
  const auto rows_of = [&](const at::Tensor& rows, const at::Tensor& cache) {
    const auto units = [&](std::int64_t elements) {
      const auto bytes = elements * static_cast<std::int64_t>(rows.element_size());
      require(bytes % kUnit == 0, ErrorKind::kBug,
              "groups of the cache have {} bytes: no multiple of {}", bytes, kUnit);
      return bytes / kUnit;
    };
    require(rows.dim() == 3 && rows.stride(2) == 1 && cache.is_contiguous() &&
                reinterpret_cast<std::uintptr_t>(rows.const_data_ptr()) % kUnit == 0,
            ErrorKind::kBug, "rows of a cache lie aligned, channel by channel");
    return launch::SlotRows{.rows = rows.const_data_ptr(),
                            .cache = cache.mutable_data_ptr(),
                            .units = units(rows.size(1) * rows.size(2)),
                            .stride = units(rows.stride(0)),
                            .group_units = units(rows.size(2)),
                            .group_stride = units(rows.stride(1))};
  };
  check(launch::store_in_slots(rows_of(key, key_cache),
                               value.defined() ? rows_of(value, value_cache) : launch::SlotRows{},
                               slots.const_data_ptr<std::int64_t>(), key.size(0), stream()));
}

}  // namespace ferry::models
