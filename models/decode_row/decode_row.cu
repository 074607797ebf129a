#include <algorithm>

#include "models/decode_row/decode_row_attention.cuh"

// All layers of a model for one row, in one kernel that reads weights all the time. One thread
// block stays on every multiprocessor for the whole pass: five times a layer each computes its part
// of a vector, publishes it and waits for the others'.
namespace ferry::models::launch {
namespace {

constexpr int kMostBlocks = 1024;  // of the cache, of one split

// The block's shared memory in front of the ring.
struct Fixed {
  Rows rows[kProducts];
  Exchange exchange;
  AttentionShare share;
  Ring ring;
  float sums[kWarps];
  std::uint64_t full[kMostSlots];
  std::uint64_t empty[kMostSlots];
};

struct SharedSizes {
  int input = 0;  // of a product; attention's memory lies there, too
  int residual = 0;
  int partial = 0;
  int blocks = 0;
  int slots = 0;
  int piece_bytes = 0;
  int bytes() const {
    return static_cast<int>(aligned(sizeof(Fixed))) + input + residual + partial + blocks +
           slots * kRowsOfSlot * piece_bytes;
  }
};

// A vector that comes in words, maybe a summand of each rank. Words null: zeros.
struct Delta {
  const PairWord* words = nullptr;  // of rank 0; the others' behind them
  int ranks = 1;
};

// The chunk `i` of the sum over ranks, in their order.
__device__ void receive_sum(const Delta& delta, int i, std::uint32_t tag, float (&sum)[kChunk]) {
  constexpr int kAtOnce = 2;
  for (int first = 0; first < delta.ranks; first += kAtOnce) {
    PairWords low[kAtOnce];
    PairWords high[kAtOnce];
    bool there;
    do {
      there = true;
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const auto* const words =
            delta.words + min(first + n, delta.ranks - 1) * (kMostRowChannels / 2) + i * 4;
        low[n] = peek_two_of_peer(words);
        high[n] = peek_two_of_peer(words + 2);
        there = there && low[n].has(tag) && high[n].has(tag);
      }
    } while (!there);
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      if (first + n >= delta.ranks) continue;
      float more[kChunk];
      widen_chunk({low[n].words[0].pair, low[n].words[1].pair, high[n].words[0].pair,
                   high[n].words[1].pair},
                  more);
#pragma unroll
      for (int j = 0; j < kChunk; ++j) sum[j] = first + n == 0 ? more[j] : sum[j] + more[j];
    }
  }
#pragma unroll
  for (int j = 0; j < kChunk; ++j) sum[j] = rounded<Bf16>(sum[j]);
}

// residual += delta, then its norm into `normed`, with the roundings of rms_norm.h.
__device__ void add_and_norm(const Delta& delta,
                             std::uint32_t tag,
                             const void* weight,
                             const DecodeRowShape& shape,
                             Bf16* residual,
                             float* sums,
                             Bf16* normed) {
  const int chunks = shape.hidden / kChunk;
  const int thread = static_cast<int>(threadIdx.x);
  auto* const old = reinterpret_cast<uint4*>(residual);
  auto* const out = reinterpret_cast<uint4*>(normed);
  float sum = 0;
#pragma unroll 1
  for (int i = thread; i < chunks; i += kThreads) {
    const uint4 by = __ldg(static_cast<const uint4*>(weight) + i);
    float x[kChunk];
    widen_chunk(old[i], x);
    if (delta.words != nullptr) {
      float more[kChunk];
      if (delta.ranks > 1) {
        receive_sum(delta, i, tag, more);
      } else {
        PairWords low;
        PairWords high;
        do {
          low = peek_two(delta.words + i * 4);
          high = peek_two(delta.words + i * 4 + 2);
        } while (!low.has(tag) || !high.has(tag));
        widen_chunk({low.words[0].pair, low.words[1].pair, high.words[0].pair, high.words[1].pair},
                    more);
      }
#pragma unroll
      for (int j = 0; j < kChunk; ++j) x[j] = rounded<Bf16>(x[j] + more[j]);
      old[i] = narrow_chunk(x);
    }
    out[i] = by;  // until the sum is there
#pragma unroll
    for (int j = 0; j < kChunk; ++j) sum = fmaf(x[j], x[j], sum);
  }
  __syncwarp();
  sum = add_lanes(sum);
  if (thread % kLanes == 0) sums[thread / kLanes] = sum;
  sync();
  float total = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) total += sums[warp];
  const float inverse = rsqrtf(total / static_cast<float>(shape.hidden) + shape.epsilon);
#pragma unroll 1
  for (int i = thread; i < chunks; i += kThreads) {
    float x[kChunk];
    float by[kChunk];
    widen_chunk(old[i], x);
    widen_chunk(out[i], by);
#pragma unroll
    for (int j = 0; j < kChunk; ++j) x[j] = by[j] * rounded<Bf16>(x[j] * inverse);
    out[i] = narrow_chunk(x);
  }
  sync();
}

// Reads all of a product's results into `to`. Words that have not arrived are read again all at
// once: one after the other, each would cost a way to L2 and back.
__device__ void receive(const PairWord* from, int count, std::uint32_t tag, Bf16* to) {
  constexpr int kAtOnce = 5;
  const int quads = count / 4;
#pragma unroll 1
  for (int first = static_cast<int>(threadIdx.x); first < quads; first += kThreads * kAtOnce) {
    PairWords words[kAtOnce];
    bool there;
    do {
      there = true;
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n)
        words[n] = peek_two(from + min(first + n * kThreads, quads - 1) * 2);
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) there = there && words[n].has(tag);
    } while (!there);
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int i = first + n * kThreads;
      if (i < quads)
        reinterpret_cast<uint2*>(to)[i] = {words[n].words[0].pair, words[n].words[1].pair};
    }
  }
  sync();
}

__device__ float silu(float x) {
  return x / (1 + expf(-x));
}

// Adds up the parts of each pair's sums and calls `write` with two results at a time.
template <typename Write>
__device__ void finish(const Rows& rows,
                       const PairOfSums* partial,
                       const Bf16* bias,
                       const Write& write) {
  const auto sums_of = [&](int pair) {
    PairOfSums sums{};
    for (int part = 0; part < rows.parts; ++part) {
      const auto more = partial[pair * rows.parts + part];
      sums.first += more.first;
      sums.second += more.second;
    }
    return sums;
  };
  const auto activated = [&](int pair) {
    const auto sums = sums_of(pair);
    return rounded<Bf16>(silu(rounded<Bf16>(sums.first))) * rounded<Bf16>(sums.second);
  };
  for (int local = static_cast<int>(threadIdx.x); local < rows.results / 2; local += kThreads) {
    PairOfSums results;
    if (rows.gated) {
      results = {activated(local * 2), activated(local * 2 + 1)};
    } else {
      results = sums_of(local);
    }
    const int word = rows.first / 2 + local;
    if (bias != nullptr) {
      results.first += widen(bias[word * 2]);
      results.second += widen(bias[word * 2 + 1]);
    }
    write(word, results);
  }
}

template <int kDim>
__global__ __launch_bounds__(kAllThreads,
                             1) void decode_row_kernel(const __grid_constant__ DecodeRow row,
                                                       const SharedSizes sizes) {
  extern __shared__ __align__(128) unsigned char memory[];
  auto& fixed = *reinterpret_cast<Fixed*>(memory);
  auto* at = memory + aligned(sizeof(Fixed));
  auto* const input = reinterpret_cast<Bf16*>(at);
  auto& attention = *reinterpret_cast<AttentionMemory*>(at);
  at += sizes.input;
  auto* const residual = reinterpret_cast<Bf16*>(at);
  at += sizes.residual;
  auto* const partial = reinterpret_cast<PairOfSums*>(at);
  at += sizes.partial;
  auto* const blocks = reinterpret_cast<std::int32_t*>(at);
  at += sizes.blocks;
  const Ring own_ring{.slots = at,
                      .full = fixed.full,
                      .empty = fixed.empty,
                      .count = sizes.slots,
                      .piece_bytes = sizes.piece_bytes};
  const auto& shape = row.shape;
  const int thread = static_cast<int>(threadIdx.x);

  if (thread < kProducts) fixed.rows[thread] = own_rows(shape, thread);
  if (thread == 0) {
    fixed.ring = own_ring;
    (void)lay_out(shape, static_cast<unsigned char*>(row.exchange), fixed.exchange);
    if (shape.ranks > 1) share_with_peers(row, fixed.exchange);
    fixed.share = attention_share(row);
  }
  make_ring(own_ring);
  __syncthreads();
  const Ring& ring = fixed.ring;
  if (thread >= kThreads) {
    copy_weights(row, fixed.rows, ring, (thread - kThreads) / kLanes);
    return;
  }
  const Exchange& exchange = fixed.exchange;
  std::uint32_t tag = *exchange.tag;
  for (int i = thread; i < shape.hidden / kChunk; i += kThreads)
    reinterpret_cast<uint4*>(residual)[i] = static_cast<const uint4*>(row.hidden)[i];
  const AttentionShare& share = fixed.share;
  const int first_block = share.first_tile * (kTile / kCacheBlock);
  if (share.any) {
    const int end =
        min(share.end_tile * (kTile / kCacheBlock), ceil_div(share.length, kCacheBlock));
    for (int i = first_block + thread; i < end; i += kThreads)
      blocks[i - first_block] = row.block_table[i];
  }
  sync();
  Place place;

  for (int index = 0; index < shape.layers; ++index) {
    const auto& layer = row.layers[index];
    ++tag;
    if (share.any) prefetch_keys<kDim>(row, layer, share, blocks);
#pragma unroll 1
    for (int product = 0; product < kProducts; ++product) {
      switch (product) {
        case kQkv:
        case kFc1:
          add_and_norm({.words = product == kFc1 ? exchange.results[kProj]
                                 : index > 0     ? exchange.results[kFc2]  // of the layer before
                                                 : nullptr,
                        .ranks = shape.ranks},
                       product == kFc1 ? tag : tag - 1,
                       product == kFc1 ? layer.mlp_norm : layer.attention_norm, shape, residual,
                       fixed.sums, input);
          break;
        case kProj:
          if (share.any) {
            attend<kDim>(row, layer, share, blocks, exchange, tag, attention);
            sync();
          }
          combine_splits<kDim>(shape, share.splits, exchange, tag, input);
          break;
        default:
          receive(exchange.results[kFc1], shape.ffn, tag, input);
      }
      const auto& rows = fixed.rows[product];
      multiply(rows, ring, input, place, partial);
      sync();
      const bool last = product == kFc2 && index + 1 == shape.layers;
      const auto* const bias = product == kQkv ? static_cast<const Bf16*>(layer.qkv_bias) : nullptr;
      finish(rows, partial, bias, [&](int word, const PairOfSums& results) {
        if (last)
          static_cast<std::uint32_t*>(row.pending)[word] = pack(results.first, results.second);
        else if (shape.ranks > 1 && is_summed(product))
          publish_to_peers(row, product, word, results, tag);
        else
          publish(exchange.results[product] + word, results, tag);
      });
    }
  }
  if (blockIdx.x == 0) {
    for (int i = thread; i < shape.hidden / kChunk; i += kThreads)
      static_cast<uint4*>(row.residual)[i] = reinterpret_cast<const uint4*>(residual)[i];
  }
  // All thread blocks end a launch before the next one begins.
  if (thread == 0 && atomicInc(exchange.ended, gridDim.x - 1) == gridDim.x - 1)
    *exchange.tag += static_cast<std::uint32_t>(shape.layers);
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

// The shared memory of a launch. No slots: the shape does not fit.
SharedSizes shared_sizes(const DecodeRowShape& shape, const Gpu& gpu) {
  SharedSizes sizes;
  int largest = 0;
  int most = 0;
  for (int product = 0; product < kProducts; ++product) {
    const int columns = columns_of(shape, product);
    largest = std::max(largest, columns);
    sizes.piece_bytes =
        std::max(sizes.piece_bytes, static_cast<int>(aligned(piece_of(columns) * 2)));
    const int words = ceil_div(rows_of(shape, product) / 2, gpu.multiprocessors);
    most = std::max(most, words * parts_of(columns) * (product == kFc1 ? 2 : 1));
  }
  sizes.input =
      static_cast<int>(aligned(std::max<std::int64_t>(largest * 2, sizeof(AttentionMemory))));
  sizes.residual = static_cast<int>(aligned(shape.hidden * 2));
  sizes.partial = static_cast<int>(aligned(most * sizeof(PairOfSums)));
  sizes.blocks = kMostBlocks * 4;
  const int left = gpu.shared_bytes - sizes.bytes();
  sizes.slots = std::clamp(left / (kRowsOfSlot * sizes.piece_bytes), 0, kMostSlots) / kSlotsApart *
                kSlotsApart;
  return sizes;
}

}  // namespace

bool decode_row_fits(const DecodeRowShape& shape) {
  const auto gpu = current_gpu();
  if (gpu.multiprocessors == 0 || shape.ranks > kMostPeers || shape.groups == 0 ||
      (shape.ranks > 1 && shape.hidden > kMostRowChannels) || shape.layers == 0 ||
      shape.layers > kMostDecoderLayers || shape.hidden % kChunk != 0 || shape.ffn % kChunk != 0 ||
      (shape.dim != 64 && shape.dim != 128) || shape.heads % shape.groups != 0 ||
      shape.hidden < 2 * gpu.multiprocessors)
    return false;
  const int units = shape.groups * ceil_div(shape.heads / shape.groups, kMostHeads);
  const int splits = std::min(kMostSplits, gpu.multiprocessors / units);
  return units <= gpu.multiprocessors && shape.max_blocks <= splits * kMostBlocks &&
         shared_sizes(shape, gpu).slots >= kFewestSlots;
}

std::int64_t decode_row_exchange(const DecodeRowShape& shape) {
  Exchange exchange;
  return lay_out(shape, nullptr, exchange);
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
  config.blockDim = kAllThreads;
  config.dynamicSmemBytes = static_cast<std::size_t>(sizes.bytes());
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, row, sizes);
}

}  // namespace ferry::models::launch
