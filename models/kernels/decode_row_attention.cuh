// Attention of one row: heads of a group to a split of the sequence's keys by each thread block, as
// flash-decoding does it (Dao et al. 2023), and what the splits come to.
#pragma once

#include <cmath>

#include "models/kernels/decode_row_stream.cuh"

namespace ferry::models::launch {
namespace {

constexpr int kCacheBlock = 64;
constexpr int kMostHeads = 8;    // of a group, that one thread block attends with at once
constexpr int kMostSplits = 16;  // of a sequence's keys

// In global memory, from one thread block to all.
struct Scratch {
  Bf16* qkv;           // [groups, queries of the group + 2, dim]
  Bf16* projected;     // [hidden]
  Bf16* activated;     // [ffn]
  float* attended;     // [heads, splits, dim], not yet divided
  float2* statistics;  // [heads, splits]: the largest score, times log2 e, and the sum of weights
};

__host__ __device__ std::int64_t aligned(std::int64_t bytes) {
  constexpr std::int64_t kAlignment = 128;
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}
__host__ __device__ std::int64_t lay_out(const DecodeRowShape& s,
                                         unsigned char* base,
                                         Scratch& to) {
  std::int64_t at = 0;
  const auto take = [&](auto*& pointer, std::int64_t count) {
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(base + at);
    at += aligned(count * static_cast<std::int64_t>(sizeof(*pointer)));
  };
  take(to.qkv, static_cast<std::int64_t>(s.heads + 2 * s.groups) * s.dim);
  take(to.projected, s.hidden);
  take(to.activated, s.ffn);
  take(to.attended, static_cast<std::int64_t>(s.heads) * kMostSplits * s.dim);
  take(to.statistics, static_cast<std::int64_t>(s.heads) * kMostSplits);
  return at;
}

struct AttentionMemory {
  float query[kMostHeads][128];  // times what makes scores exponents of 2
  float weights[kMostHeads][kCacheBlock];
  float growth[kMostHeads];
};

// Which keys this thread block attends to, with which heads.
struct AttentionShare {
  bool any = false;
  int splits = 0;  // of the keys, over thread blocks
  int split = 0;
  int first_key = 0;  // that the row sees
  int length = 0;
  int first_tile = 0;  // tiles are blocks of the cache
  int end_tile = 0;
  int group = 0;
  int first_head = 0;  // in the group
  int heads = 0;
};

__device__ AttentionShare attention_share(const DecodeRow& row) {
  const auto& shape = row.shape;
  AttentionShare share{.length = *row.length};
  share.first_key = shape.window > 0 ? max(0, share.length - shape.window) : 0;
  const int heads = shape.heads / shape.groups;
  const int parts = (heads + kMostHeads - 1) / kMostHeads;  // of a group's heads
  const int heads_of_part = (heads + parts - 1) / parts;
  const int units = shape.groups * parts;
  const int first_tile = share.first_key / kCacheBlock;
  const int tiles = (share.length + kCacheBlock - 1) / kCacheBlock - first_tile;
  if (tiles <= 0) return share;
  const int most = min(kMostSplits, max(1, static_cast<int>(gridDim.x) / units));
  const int tiles_of_split = (tiles + most - 1) / most;
  share.splits = (tiles + tiles_of_split - 1) / tiles_of_split;
  const int block = static_cast<int>(blockIdx.x);
  share.split = block / units;
  share.any = share.split < share.splits;
  share.group = block % units / parts;
  share.first_head = block % parts * heads_of_part;
  share.heads = min(heads_of_part, heads - share.first_head);
  share.first_tile = first_tile + share.split * tiles_of_split;
  share.end_tile = min(share.first_tile + tiles_of_split, first_tile + tiles);
  return share;
}

// Of a group's part of a block.
template <int kDim>
__device__ std::int64_t cache_offset(std::int32_t block, int groups, int group) {
  return (static_cast<std::int64_t>(block) * kCacheBlock * groups + group) * kDim;
}

// The share's keys and values, but those of the row itself, into L2.
template <int kDim>
__device__ void prefetch_keys(const DecodeRow& row,
                              const DecoderLayer& layer,
                              const AttentionShare& share,
                              const std::int32_t* tiles) {
  constexpr int kLinesOfKey = kDim * static_cast<int>(sizeof(Bf16)) / 128;
  constexpr int kLines = kCacheBlock * kLinesOfKey;
  const std::int64_t stride = static_cast<std::int64_t>(row.shape.groups) * kDim;
  for (int tile = share.first_tile; tile < share.end_tile; ++tile) {
    const auto offset =
        cache_offset<kDim>(tiles[tile - share.first_tile], row.shape.groups, share.group);
    for (int i = static_cast<int>(threadIdx.x); i < kLines; i += kThreads) {
      const int key = i / kLinesOfKey;
      if (tile * kCacheBlock + key >= share.length) break;
      const auto at = offset + key * stride + i % kLinesOfKey * (kDim / kLinesOfKey);
      prefetch(static_cast<const Bf16*>(layer.key_cache) + at);
      prefetch(static_cast<const Bf16*>(layer.value_cache) + at);
    }
  }
}

// One head by one warp: normed, if there is a weight, and turned.
template <int kDim>
__device__ void turn_head(const DecodeRow& row,
                          const Bf16* head,
                          const void* norm,
                          float (&x)[kDim / kLanes]) {
  constexpr int kOfLane = kDim / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const auto* const cos = static_cast<const Bf16*>(row.cos);
  const auto* const sin = static_cast<const Bf16*>(row.sin);
  float sum = 0;
#pragma unroll
  for (int j = 0; j < kOfLane; ++j) {
    x[j] = widen(__ldcg(head + lane + j * kLanes));
    sum = fmaf(x[j], x[j], sum);
  }
  if (norm != nullptr) {
    const float inverse = rsqrtf(add_lanes(sum) / static_cast<float>(kDim) + row.shape.epsilon);
#pragma unroll
    for (int j = 0; j < kOfLane; ++j) {
      const float by = widen(static_cast<const Bf16*>(norm)[lane + j * kLanes]);
      x[j] = rounded<Bf16>(by * rounded<Bf16>(x[j] * inverse));
    }
  }
#pragma unroll
  for (int j = 0; j < kOfLane / 2; ++j) {
    const int low = lane + j * kLanes;
    const int high = low + kDim / 2;
    const float u = x[j];
    const float v = x[j + kOfLane / 2];
    x[j] = rounded<Bf16>(rounded<Bf16>(u * widen(cos[low])) - rounded<Bf16>(v * widen(sin[low])));
    x[j + kOfLane / 2] =
        rounded<Bf16>(rounded<Bf16>(v * widen(cos[high])) + rounded<Bf16>(u * widen(sin[high])));
  }
}

// The share's heads against its keys, among them the row's own, which goes into the cache.
template <int kDim>
__device__ void attend(const DecodeRow& row,
                       const DecoderLayer& layer,
                       const AttentionShare& share,
                       const std::int32_t* tiles,
                       const Scratch& scratch,
                       AttentionMemory& shared) {
  constexpr int kOfLane = kDim / kLanes;
  constexpr int kLanesOfKey = 4;
  constexpr int kChunksOfKey = kDim / kChunk / kLanesOfKey;  // of each of those lanes
  constexpr int kChunksOfWarp = kDim / kChunk / kWarps;      // of values
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / kLanes;
  const int lane = thread % kLanes;
  const auto& shape = row.shape;
  const int heads_of_group = shape.heads / shape.groups;
  const auto* const mixed =
      scratch.qkv + static_cast<std::int64_t>(share.group) * (heads_of_group + 2) * kDim;
  const std::int64_t stride = static_cast<std::int64_t>(shape.groups) * kDim;
  auto* const keys = static_cast<Bf16*>(layer.key_cache);
  auto* const values = static_cast<Bf16*>(layer.value_cache);

  const float to_exponent = shape.scale * static_cast<float>(M_LOG2E);
  const std::int64_t slot = *row.slot;
  const bool keeps = share.end_tile * kCacheBlock >= share.length && slot >= 0;
  for (int task = warp; task < share.heads + (keeps ? 2 : 0); task += kWarps) {
    float x[kOfLane];
    const auto own = (slot * shape.groups + share.group) * kDim + lane;
    if (task < share.heads) {
      turn_head<kDim>(row, mixed + (share.first_head + task) * kDim, layer.q_norm, x);
#pragma unroll
      for (int j = 0; j < kOfLane; ++j) shared.query[task][lane + j * kLanes] = x[j] * to_exponent;
    } else if (task == share.heads) {
      turn_head<kDim>(row, mixed + heads_of_group * kDim, layer.k_norm, x);
#pragma unroll
      for (int j = 0; j < kOfLane; ++j) keys[own + j * kLanes] = narrow<Bf16>(x[j]);
    } else {
#pragma unroll
      for (int j = 0; j < kOfLane; ++j)
        values[own + j * kLanes] = __ldcg(mixed + (heads_of_group + 1) * kDim + lane + j * kLanes);
    }
  }
  __syncthreads();

  float maximum = -INFINITY;  // of head `warp`
  float sum = 0;
  float result[kMostHeads][kChunk] = {};
  for (int tile = share.first_tile; tile < share.end_tile; ++tile) {
    const auto offset =
        cache_offset<kDim>(tiles[tile - share.first_tile], shape.groups, share.group);
    {  // scores: four lanes a key
      const int key = thread / kLanesOfKey;
      const int part = thread % kLanesOfKey;
      const int position = tile * kCacheBlock + key;
      const bool exists = position < share.length;
      float k[kChunksOfKey][kChunk];
#pragma unroll
      for (int c = 0; c < kChunksOfKey; ++c) {
        const auto* const from = keys + offset + key * stride + (part + c * kLanesOfKey) * kChunk;
        widen_chunk(exists ? load_fresh(from) : uint4{}, k[c]);
      }
#pragma unroll
      for (int head = 0; head < kMostHeads; ++head) {
        if (head >= share.heads) break;
        float score = 0;
#pragma unroll
        for (int c = 0; c < kChunksOfKey; ++c) {
          const auto* const q = shared.query[head] + (part + c * kLanesOfKey) * kChunk;
#pragma unroll
          for (int j = 0; j < kChunk; ++j) score = fmaf(q[j], k[c][j], score);
        }
#pragma unroll
        for (int distance = kLanesOfKey / 2; distance > 0; distance /= 2)
          score += __shfl_xor_sync(0xffffffffu, score, distance);
        if (part == 0)
          shared.weights[head][key] = exists && position >= share.first_key ? score : -INFINITY;
      }
    }
    __syncthreads();
    if (warp < share.heads) {  // weights: a warp a head
      auto& weights = shared.weights[warp];
      const float scores[] = {weights[lane], weights[lane + kLanes]};
      const float now = fmaxf(maximum, largest_of_lanes(fmaxf(scores[0], scores[1])));
      const float shift = now == -INFINITY ? 0 : now;
      const float growth = exp2f(maximum - shift);
      const float low = exp2f(scores[0] - shift);
      const float high = exp2f(scores[1] - shift);
      maximum = now;
      sum = sum * growth + add_lanes(low + high);
      weights[lane] = low;
      weights[lane + kLanes] = high;
      if (lane == 0) shared.growth[warp] = growth;
    }
    __syncthreads();
    {  // the result: a warp kChunksOfWarp chunks of channels
#pragma unroll
      for (int head = 0; head < kMostHeads; ++head) {
        if (head >= share.heads) break;
        const float growth = shared.growth[head];
#pragma unroll
        for (int j = 0; j < kChunk; ++j) result[head][j] *= growth;
      }
      const int chunk = warp * kChunksOfWarp + lane % kChunksOfWarp;
      constexpr int kKeysAtOnce = kLanes / kChunksOfWarp;
#pragma unroll
      for (int i = 0; i < kCacheBlock / kKeysAtOnce; ++i) {
        const int key = lane / kChunksOfWarp + i * kKeysAtOnce;
        if (tile * kCacheBlock + key >= share.length) break;
        float v[kChunk];
        widen_chunk(load_fresh(values + offset + key * stride + chunk * kChunk), v);
#pragma unroll
        for (int head = 0; head < kMostHeads; ++head) {
          if (head >= share.heads) break;
          const float weight = shared.weights[head][key];
#pragma unroll
          for (int j = 0; j < kChunk; ++j) result[head][j] = fmaf(weight, v[j], result[head][j]);
        }
      }
    }
    __syncthreads();
  }
  const int first_head = share.group * heads_of_group + share.first_head;
#pragma unroll
  for (int head = 0; head < kMostHeads; ++head) {
    if (head >= share.heads) break;
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
#pragma unroll
      for (int distance = kLanes / 2; distance >= kChunksOfWarp; distance /= 2)
        result[head][j] += __shfl_xor_sync(0xffffffffu, result[head][j], distance);
    }
    if (lane < kChunksOfWarp) {
      auto* const to = reinterpret_cast<float4*>(
          scratch.attended +
          (static_cast<std::int64_t>(first_head + head) * kMostSplits + share.split) * kDim +
          (warp * kChunksOfWarp + lane) * kChunk);
      to[0] = {result[head][0], result[head][1], result[head][2], result[head][3]};
      to[1] = {result[head][4], result[head][5], result[head][6], result[head][7]};
    }
  }
  if (warp < share.heads && lane == 0)
    scratch.statistics[(first_head + warp) * kMostSplits + share.split] = {maximum, sum};
}

// What the splits of each head come to, [heads, dim].
template <int kDim>
__device__ void combine_splits(const DecodeRowShape& shape,
                               int splits,
                               const Scratch& scratch,
                               Bf16* attended) {
  constexpr int kWidth = 4;
  for (int i = static_cast<int>(threadIdx.x); i < shape.heads * kDim / kWidth; i += kThreads) {
    const int head = i * kWidth / kDim;
    const int channel = i * kWidth % kDim;
    const auto* const statistics = scratch.statistics + head * kMostSplits;
    float maximum = -INFINITY;
#pragma unroll 4
    for (int split = 0; split < splits; ++split)
      maximum = fmaxf(maximum, __ldcg(statistics + split).x);
    float sum = 0;
    float4 result{};
#pragma unroll 4
    for (int split = 0; split < splits; ++split) {
      const float2 of_split = __ldcg(statistics + split);
      const float weight = exp2f(of_split.x - maximum);
      const float4 x = __ldcg(reinterpret_cast<const float4*>(
          scratch.attended + (static_cast<std::int64_t>(head) * kMostSplits + split) * kDim +
          channel));
      sum = fmaf(weight, of_split.y, sum);
      result.x = fmaf(weight, x.x, result.x);
      result.y = fmaf(weight, x.y, result.y);
      result.z = fmaf(weight, x.z, result.z);
      result.w = fmaf(weight, x.w, result.w);
    }
    const float factor = sum > 0 ? 1 / sum : 0;
    auto* const to = reinterpret_cast<__nv_bfloat162*>(attended + i * kWidth);
    to[0] = __floats2bfloat162_rn(result.x * factor, result.y * factor);
    to[1] = __floats2bfloat162_rn(result.z * factor, result.w * factor);
  }
  __syncthreads();
}

}  // namespace
}  // namespace ferry::models::launch
