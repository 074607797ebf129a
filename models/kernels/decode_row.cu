#include <algorithm>

#include "models/kernels/decode_row_attention.cuh"

// All layers of a model for one row, in one kernel that never stops reading weights. One thread
// block stays on every multiprocessor for the whole pass: five times a layer all of them compute
// their part of a vector and wait for the others', at a barrier of the grid.
namespace ferry::models::launch {
namespace {

constexpr int kMostSlots = 16;      // of a warp's ring
constexpr int kMostPieces = 2048;   // of one product, of a thread block
constexpr int kMostTiles = 512;     // blocks of the cache, of one split
constexpr int kMostNormChunks = 4;  // of a thread

// In shared memory, in front of the ring.
struct Fixed {
  Rows rows[kProducts];
  float partial[kMostPieces];
  float sums[kWarps];
  std::int32_t tiles[kMostTiles];  // blocks of the cache
  std::uint64_t landed[kWarps * kMostSlots];
};

struct SharedSizes {
  int input = 0;  // of a product; attention's memory lies there, too
  int residual = 0;
  int slots = 0;
  int slot_bytes = 0;
  int bytes() const {
    return static_cast<int>(aligned(sizeof(Fixed))) + input + residual +
           kWarps * slots * slot_bytes;
  }
};

// residual += delta (or null), then its norm into `normed`, with the roundings of rms_norm.h.
__device__ void add_and_norm(const Bf16* delta,
                             const void* weight,
                             const DecodeRowShape& shape,
                             Bf16* residual,
                             float* sums,
                             Bf16* normed) {
  const int chunks = shape.hidden / kChunk;
  const int thread = static_cast<int>(threadIdx.x);
  uint4 more[kMostNormChunks];
  uint4 by[kMostNormChunks];
#pragma unroll
  for (int n = 0; n < kMostNormChunks; ++n) {
    const int i = thread + n * kThreads;
    if (i >= chunks) continue;
    by[n] = __ldg(static_cast<const uint4*>(weight) + i);
    if (delta != nullptr) more[n] = load_fresh(delta + i * kChunk);
  }
  float x[kMostNormChunks][kChunk];
  float sum = 0;
#pragma unroll
  for (int n = 0; n < kMostNormChunks; ++n) {
    const int i = thread + n * kThreads;
    if (i >= chunks) continue;
    auto* const at = reinterpret_cast<uint4*>(residual) + i;
    widen_chunk(*at, x[n]);
    if (delta != nullptr) {
      float added[kChunk];
      widen_chunk(more[n], added);
#pragma unroll
      for (int j = 0; j < kChunk; ++j) x[n][j] = rounded<Bf16>(x[n][j] + added[j]);
      *at = narrow_chunk(x[n]);
    }
#pragma unroll
    for (int j = 0; j < kChunk; ++j) sum = fmaf(x[n][j], x[n][j], sum);
  }
  sum = add_lanes(sum);
  if (thread % kLanes == 0) sums[thread / kLanes] = sum;
  __syncthreads();
  float total = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) total += sums[warp];
  const float inverse = rsqrtf(total / static_cast<float>(shape.hidden) + shape.epsilon);
#pragma unroll
  for (int n = 0; n < kMostNormChunks; ++n) {
    const int i = thread + n * kThreads;
    if (i >= chunks) continue;
    float factor[kChunk];
    widen_chunk(by[n], factor);
#pragma unroll
    for (int j = 0; j < kChunk; ++j) x[n][j] = factor[j] * rounded<Bf16>(x[n][j] * inverse);
    reinterpret_cast<uint4*>(normed)[i] = narrow_chunk(x[n]);
  }
  __syncthreads();
}

__device__ float silu(float x) {
  return x / (1 + expf(-x));
}

template <int kDim>
__global__ __launch_bounds__(kThreads,
                             1) void decode_row_kernel(const __grid_constant__ DecodeRow row,
                                                       const SharedSizes sizes) {
  extern __shared__ __align__(128) unsigned char memory[];
  auto& fixed = *reinterpret_cast<Fixed*>(memory);
  auto* const input = reinterpret_cast<Bf16*>(memory + aligned(sizeof(Fixed)));
  auto* const residual = input + sizes.input / sizeof(Bf16);
  auto* const ring = reinterpret_cast<unsigned char*>(residual) + sizes.residual;
  auto& attention = *reinterpret_cast<AttentionMemory*>(input);
  const auto& shape = row.shape;
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / kLanes;
  Scratch scratch;
  (void)lay_out(shape, static_cast<unsigned char*>(row.scratch), scratch);
  auto* const pending = static_cast<Bf16*>(row.pending);

  if (thread == 0) {
    const int query_columns = shape.heads * kDim;
    fixed.rows[kQkv] =
        rows_of((shape.heads + 2 * shape.groups) * kDim, shape.hidden, false, shape.ffn);
    fixed.rows[kProj] = rows_of(shape.hidden, query_columns, false, shape.ffn);
    fixed.rows[kFc1] = rows_of(shape.ffn, shape.hidden, true, shape.ffn);
    fixed.rows[kFc2] = rows_of(shape.hidden, shape.ffn, false, shape.ffn);
  }
  for (int i = thread; i < shape.hidden / kChunk; i += kThreads)
    reinterpret_cast<uint4*>(residual)[i] = static_cast<const uint4*>(row.hidden)[i];
  __syncthreads();
  WeightStream stream(row, fixed.rows, ring + warp * sizes.slots * sizes.slot_bytes,
                      fixed.landed + warp * kMostSlots, sizes.slots, sizes.slot_bytes);
  GridBarrier barrier(row.arrivals, shape.layers);
  const auto share = attention_share(row);
  for (int tile = share.first_tile + thread; tile < share.end_tile; tile += kThreads)
    fixed.tiles[tile - share.first_tile] = row.block_table[tile];
  __syncthreads();
  const auto sum_of = [&](const Rows& rows, int local) {
    float sum = 0;
    for (int part = 0; part < rows.parts; ++part) sum += fixed.partial[local * rows.parts + part];
    return sum;
  };
  // Its rows of the product with `input`, as `finish` rounds them.
  const auto multiply = [&](Product product, Bf16* to, const auto& finish) {
    const auto& rows = fixed.rows[product];
    stream.multiply(rows, input, fixed.partial);
    __syncthreads();
    for (int local = thread; local < rows.half; local += kThreads)
      to[rows.first + local] = finish(rows, local);
  };
  const auto plain = [&](const Rows& rows, int local) { return narrow<Bf16>(sum_of(rows, local)); };

  for (int index = 0; index < shape.layers; ++index) {
    const auto& layer = row.layers[index];
    if (share.any) prefetch_keys<kDim>(row, layer, share, fixed.tiles);
    prefetch_all(layer.mlp_norm, shape.hidden);
    add_and_norm(index == 0 ? nullptr : pending, layer.attention_norm, shape, residual, fixed.sums,
                 input);
    multiply(kQkv, scratch.qkv, [&](const Rows& rows, int local) {
      const auto* const bias = static_cast<const Bf16*>(layer.qkv_bias);
      return narrow<Bf16>(sum_of(rows, local) +
                          (bias == nullptr ? 0 : widen(bias[rows.first + local])));
    });
    barrier.wait();

    if (share.any) attend<kDim>(row, layer, share, fixed.tiles, scratch, attention);
    barrier.wait();

    combine_splits<kDim>(shape, share.splits, scratch, input);
    multiply(kProj, scratch.projected, plain);
    barrier.wait();

    if (index + 1 < shape.layers) {
      const auto& next = row.layers[index + 1];
      prefetch_all(next.attention_norm, shape.hidden);
      prefetch_all(next.qkv_bias, (shape.heads + 2 * shape.groups) * kDim);
      prefetch_all(next.q_norm, kDim);
      prefetch_all(next.k_norm, kDim);
    }
    add_and_norm(scratch.projected, layer.mlp_norm, shape, residual, fixed.sums, input);
    multiply(kFc1, scratch.activated, [&](const Rows& rows, int local) {
      const float gate = rounded<Bf16>(sum_of(rows, local));
      const float up = rounded<Bf16>(sum_of(rows, local + rows.half));
      return narrow<Bf16>(rounded<Bf16>(silu(gate)) * up);
    });
    barrier.wait();

    for (int i = thread; i < shape.ffn / kChunk; i += kThreads)
      reinterpret_cast<uint4*>(input)[i] = load_fresh(scratch.activated + i * kChunk);
    __syncthreads();
    multiply(kFc2, pending, plain);
    if (index + 1 < shape.layers) barrier.wait();
  }
  if (blockIdx.x == 0) {
    for (int i = thread; i < shape.hidden / kChunk; i += kThreads)
      static_cast<uint4*>(row.residual)[i] = reinterpret_cast<const uint4*>(residual)[i];
  }
}

struct Gpu {
  int multiprocessors = 0;
  int shared_bytes = 0;  // of a thread block
};

Gpu current_gpu() {
  Gpu gpu;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return {};
  (void)cudaDeviceGetAttribute(&gpu.multiprocessors, cudaDevAttrMultiProcessorCount, device);
  (void)cudaDeviceGetAttribute(&gpu.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return gpu;
}

// No slots: the shape does not fit.
SharedSizes shared_sizes(const DecodeRowShape& shape, const Gpu& gpu) {
  const int queries = shape.heads * shape.dim;
  SharedSizes sizes;
  int largest = 0;
  for (const int columns : {shape.hidden, queries, shape.ffn}) {
    largest = std::max(largest, columns);
    sizes.slot_bytes = std::max(sizes.slot_bytes, static_cast<int>(aligned(piece_of(columns) * 2)));
  }
  sizes.input =
      static_cast<int>(aligned(std::max<std::int64_t>(largest * 2, sizeof(AttentionMemory))));
  sizes.residual = static_cast<int>(aligned(shape.hidden * 2));
  const int left = gpu.shared_bytes - sizes.bytes();
  sizes.slots = std::clamp(left / (kWarps * sizes.slot_bytes), 0, kMostSlots);
  return sizes;
}

}  // namespace

bool decode_row_fits(const DecodeRowShape& shape) {
  const auto gpu = current_gpu();
  if (gpu.multiprocessors == 0 || shape.layers == 0 || shape.layers > kMostDecoderLayers ||
      shape.hidden % kChunk != 0 || shape.ffn % kChunk != 0 ||
      (shape.dim != 64 && shape.dim != 128) || shape.heads % shape.groups != 0 ||
      shape.hidden > kMostNormChunks * kThreads * kChunk)
    return false;
  const auto pieces = [&](int rows, int columns) {
    return ((rows + gpu.multiprocessors - 1) / gpu.multiprocessors) * parts_of(columns);
  };
  const int most = std::max({pieces((shape.heads + 2 * shape.groups) * shape.dim, shape.hidden),
                             pieces(shape.hidden, shape.heads * shape.dim),
                             2 * pieces(shape.ffn, shape.hidden), pieces(shape.hidden, shape.ffn)});
  const int units = shape.groups * ((shape.heads / shape.groups + kMostHeads - 1) / kMostHeads);
  const int splits = std::min(kMostSplits, gpu.multiprocessors / units);
  constexpr int kFewestSlots = 2;
  return most <= kMostPieces && shape.max_blocks <= splits * kMostTiles &&
         shared_sizes(shape, gpu).slots >= kFewestSlots;
}

std::int64_t decode_row_scratch(const DecodeRowShape& shape) {
  Scratch scratch;
  return lay_out(shape, nullptr, scratch);
}

cudaError_t decode_row(const DecodeRow& row, cudaStream_t stream) {
  const auto gpu = current_gpu();
  const auto sizes = shared_sizes(row.shape, gpu);
  const auto kernel = row.shape.dim == 64 ? decode_row_kernel<64> : decode_row_kernel<128>;
  const auto error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizes.bytes());
  if (error != cudaSuccess) return error;
  // All thread blocks wait for each other.
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(gpu.multiprocessors);
  config.blockDim = kThreads;
  config.dynamicSmemBytes = static_cast<std::size_t>(sizes.bytes());
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, row, sizes);
}

}  // namespace ferry::models::launch
