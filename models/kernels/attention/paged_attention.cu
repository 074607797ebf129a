#include "models/kernels/attention/paged_ordered.cuh"
#include "models/kernels/attention/paged_rows.cuh"

namespace ferry::models::launch {
namespace {

template <int kDim, int kValues, int kKeys, int kStages, bool kShares>
__global__ __launch_bounds__(kThreads) void paged_attention_kernel(PagedArguments a) {
  extern __shared__ __align__(16) unsigned char memory[];
  release_dependents();
  wait_for_inputs();
  const int shares =
      kShares ? static_cast<int>(cooperative_groups::this_cluster().num_blocks()) : 1;
  const auto tile = tile_of(a, static_cast<int>(blockIdx.x) / shares, static_cast<int>(blockIdx.y));
  if (tile.length == 0) return write_zeros<kValues>(a, tile);
  attend<kDim, kValues, kKeys, kStages, kShares>(
      a, tile, *reinterpret_cast<Shared<kDim, kValues, kKeys, kStages>*>(memory));
}

// The same bits by a cluster of kRanks, which a short sequence leaves to its first block.
template <int kDim, int kKeys, int kRanks>
union OrderedMemory {
  Shared<kDim, kDim, kKeys, 3> alone;
  OrderedShared<kDim, kKeys, kRanks> together;
};
template <int kDim, int kKeys, int kRanks>
__global__ __launch_bounds__(kThreads) void ordered_attention_kernel(PagedArguments a) {
  constexpr int kFewBlocks = 6;  // of keys, which one thread block attends to as fast
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<OrderedMemory<kDim, kKeys, kRanks>*>(memory);
  release_dependents();
  wait_for_inputs();
  const auto tile = tile_of(a, static_cast<int>(blockIdx.x) / kRanks, static_cast<int>(blockIdx.y));
  if (tile.length == 0) return write_zeros<kDim>(a, tile);
  if (tile.length - first_key_of(a, tile) > kFewBlocks * kKeys)
    attend_ordered<kDim, kKeys, kRanks>(a, tile, shared.together);
  else if (static_cast<int>(blockIdx.x) % kRanks == 0)
    attend<kDim, kDim, kKeys, 3, false>(a, tile, shared.alone);
}

// Few thread blocks have a multiprocessor to themselves, and hide the memory's latency alone, or
// are clusters that fill the multiprocessors.
template <int kDim, int kValues, int kKeys>
cudaError_t launch_paged_attention(const PagedArguments& arguments, cudaStream_t stream) {
  const auto& shape = arguments.shape;
  const int tiles = ceil_div(shape.heads / shape.groups, kRows);
  const dim3 grid(static_cast<unsigned>(shape.groups * tiles),
                  static_cast<unsigned>(shape.sequences));
  const int blocks = shape.groups * tiles * shape.sequences;
  const auto launch = [&](auto* kernel, std::size_t bytes, int cluster) {
    return launch_rows(kernel, bytes, cluster, arguments, grid, stream);
  };
  const auto alone = [&](auto stages) {
    constexpr int kStages = decltype(stages)::value;
    return launch(paged_attention_kernel<kDim, kValues, kKeys, kStages, false>,
                  sizeof(Shared<kDim, kValues, kKeys, kStages>), 1);
  };
  const bool may_be_long = shape.max_blocks * kCacheBlock > kLeastBlocksOfShare * kKeys;
  if (!shape.in_order && may_be_long && blocks <= kMultiprocessors)
    return launch(paged_attention_kernel<kDim, kValues, kKeys, 3, true>,
                  sizeof(Shared<kDim, kValues, kKeys, 3>), shares_of(blocks));
  // A round has a fixed time, so that more blocks than these are faster alone.
  constexpr int kMostOfClusters = 8;
  if constexpr (kDim == 128) {
    constexpr int kRanks = 8;
    if (may_be_long && arguments.sinks == nullptr && blocks <= kMostOfClusters)
      return launch(ordered_attention_kernel<kDim, kKeys, kRanks>,
                    sizeof(OrderedMemory<kDim, kKeys, kRanks>), kRanks);
  }
  constexpr int kSharedBytes = 220 << 10;
  constexpr int kBytesOfStage = kKeys * (kDim + kValues) * static_cast<int>(sizeof(__nv_bfloat16));
  constexpr int kMostStages = kSharedBytes / kBytesOfStage;
  if (blocks <= kMultiprocessors) return alone(std::integral_constant<int, kMostStages>{});
  if (blocks <= 2 * kMultiprocessors) return alone(std::integral_constant<int, 3>{});
  return alone(std::integral_constant<int, 2>{});
}

__global__ void store_in_slots_kernel(SlotRows key,
                                      SlotRows value,
                                      const std::int64_t* slots,
                                      std::int64_t num_rows) {
  release_dependents();
  wait_for_inputs();
  const std::int64_t units = key.units + value.units;
  const std::int64_t work = num_rows * units;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < work;
       i += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    const std::int64_t row = i / units;
    const std::int64_t slot = slots[row];
    if (slot < 0) continue;
    const bool of_key = i % units < key.units;
    const auto& rows = of_key ? key : value;
    const std::int64_t at = of_key ? i % units : i % units - key.units;
    const auto* const from = static_cast<const uint4*>(rows.rows);
    static_cast<uint4*>(rows.cache)[slot * rows.units + at] =
        from[row * rows.stride + at / rows.group_units * rows.group_stride + at % rows.group_units];
  }
}

}  // namespace

cudaError_t paged_attention(const void* query,
                            const void* key,
                            const void* value,
                            const std::int32_t* block_tables,
                            const std::int32_t* lengths,
                            const void* sinks,
                            void* result,
                            PagedAttentionShape shape,
                            cudaStream_t stream) {
  if (shape.sequences == 0) return cudaSuccess;
  const auto bf16 = [](const void* pointer) { return static_cast<const __nv_bfloat16*>(pointer); };
  const PagedArguments arguments{
      .query = bf16(query),
      .key = bf16(key),
      .value = bf16(value),
      .block_tables = block_tables,
      .lengths = lengths,
      .sinks = bf16(sinks),
      .result = static_cast<__nv_bfloat16*>(result),
      .shape = shape,
      .scale_log2 = static_cast<float>(static_cast<double>(shape.scale) * M_LOG2E)};
  // Keys of a block: flash's for heads of this size.
  switch (shape.dim) {
    case 64:
      return launch_paged_attention<64, 64, 128>(arguments, stream);
    case 128:
      return launch_paged_attention<128, 128, 64>(arguments, stream);
    case 192:
      return launch_paged_attention<192, 128, 64>(arguments, stream);
    case 256:
      return launch_paged_attention<256, 256, 64>(arguments, stream);
    case 576:
      return paged_latents(arguments, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t store_in_slots(SlotRows key,
                           SlotRows value,
                           const std::int64_t* slots,
                           std::int64_t num_rows,
                           cudaStream_t stream) {
  if (num_rows == 0) return cudaSuccess;
  constexpr int kThreadsOfCopy = 256;
  return launch_dependent(store_in_slots_kernel,
                          blocks_of(num_rows * (key.units + value.units), kThreadsOfCopy),
                          kThreadsOfCopy, 0, stream, key, value, slots, num_rows);
}

}  // namespace ferry::models::launch
