// Attention of one row: some heads of a group to a split of the sequence's keys by each thread
// block, as flash-decoding does it (Dao et al. 2023), and the combination of the splits.
#pragma once

#include <cmath>

#include "models/decode_row/decode_row_stream.cuh"

namespace ferry::models::launch {
namespace {

constexpr int kCacheBlock = 64;
constexpr int kTile = 128;  // keys at once
constexpr int kLanesOfKey = kThreads / kTile;
constexpr int kMostHeads = 2;  // of a group, that one thread block attends with
constexpr int kMostDim = 128;

struct AttentionMemory {
  float query[kMostHeads][kMostDim];  // times what makes scores exponents of 2
  alignas(16) Bf16 key[kMostDim];     // the row's own
  alignas(16) Bf16 value[kMostDim];
  float weights[kMostHeads][kTile];
  float growth[kMostHeads];
  float2 statistics[kMostHeads];
  alignas(16) float results[kWarps][kMostHeads][kMostDim];
};

// The keys and the heads that this thread block computes attention for.
struct AttentionShare {
  bool any = false;
  int splits = 0;  // of the keys, over thread blocks
  int split = 0;
  int first_key = 0;  // that the row sees
  int length = 0;
  int first_tile = 0;
  int end_tile = 0;
  int group = 0;
  int first_head = 0;  // in the group
  int heads = 0;
};

__device__ inline AttentionShare attention_share(const DecodeRow& row) {
  const auto& shape = row.shape;
  AttentionShare share{.length = *row.length};
  share.first_key = shape.window > 0 ? max(0, share.length - shape.window) : 0;
  const int first_tile = share.first_key / kTile;
  const int tiles = ceil_div(share.length, kTile) - first_tile;
  if (tiles <= 0) return share;
  const int blocks = static_cast<int>(gridDim.x);
  const int heads = shape.heads / shape.groups;
  int parts = heads;  // of a group's heads: the more the better
  const auto heads_of = [&](int of_part) { return ceil_div(heads, of_part); };
  for (int most = 1;
       most < kMostHeads && shape.groups * parts * min(tiles, kMostSplits) > blocks;) {
    most *= 2;
    parts = heads_of(most);
  }
  const int heads_of_part = heads_of(parts);
  const int units = shape.groups * parts;
  const int most = min(kMostSplits, max(1, blocks / units));
  const int tiles_of_split = ceil_div(tiles, most);
  share.splits = ceil_div(tiles, tiles_of_split);
  const int block = static_cast<int>(blockIdx.x);
  share.split = block / units;
  share.group = block % units / parts;
  share.first_head = block % parts * heads_of_part;
  share.heads = min(heads_of_part, heads - share.first_head);
  share.any = share.split < share.splits && share.heads > 0;
  share.first_tile = first_tile + share.split * tiles_of_split;
  share.end_tile = min(share.first_tile + tiles_of_split, first_tile + tiles);
  return share;
}

// A thread's part of a tile of keys: of one key some chunks; of values one chunk of some keys.
template <int kDim>
struct TileParts {
  static constexpr int kCount = kTile * kDim / kChunk / kThreads;
  static constexpr int kChunks = kDim / kChunk;
  static constexpr int kKeysApart = kThreads / kChunks;
};

// The offset, in elements, of group `group` of key number `key` in a cache.
template <int kDim>
__device__ std::int64_t cache_offset(const std::int32_t* blocks, int key, int groups, int group) {
  return ((static_cast<std::int64_t>(blocks[key / kCacheBlock]) * kCacheBlock + key % kCacheBlock) *
              groups +
          group) *
         kDim;
}

// Loads the share's keys that precede the row's own. `blocks` begins with the block of the share's
// first tile.
template <int kDim>
__device__ void load_keys(const DecodeRow& row,
                          const void* cache,
                          const AttentionShare& share,
                          int tile,
                          const std::int32_t* blocks,
                          uint4 (&to)[TileParts<kDim>::kCount]) {
  const int thread = static_cast<int>(threadIdx.x);
  const int key = thread / kLanesOfKey;
  const int position = tile * kTile + key;
  const bool exists = position >= share.first_key && position < share.length - 1;
  const auto offset = exists ? cache_offset<kDim>(blocks, position - share.first_tile * kTile,
                                                  row.shape.groups, share.group)
                             : 0;
#pragma unroll
  for (int c = 0; c < TileParts<kDim>::kCount; ++c)
    to[c] = exists
                ? *reinterpret_cast<const uint4*>(static_cast<const Bf16*>(cache) + offset +
                                                  (thread % kLanesOfKey + c * kLanesOfKey) * kChunk)
                : uint4{};
}
template <int kDim>
__device__ void load_values(const DecodeRow& row,
                            const void* cache,
                            const AttentionShare& share,
                            int tile,
                            const std::int32_t* blocks,
                            uint4 (&to)[TileParts<kDim>::kCount]) {
  using Parts = TileParts<kDim>;
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int i = 0; i < Parts::kCount; ++i) {
    const int position = tile * kTile + thread / Parts::kChunks + i * Parts::kKeysApart;
    const bool exists = position >= share.first_key && position < share.length - 1;
    to[i] = exists ? *reinterpret_cast<const uint4*>(
                         static_cast<const Bf16*>(cache) +
                         cache_offset<kDim>(blocks, position - share.first_tile * kTile,
                                            row.shape.groups, share.group) +
                         thread % Parts::kChunks * kChunk)
                   : uint4{};
  }
}

// Prefetches the share's keys and values, except the row's own, into L2. Called by all threads.
template <int kDim>
__device__ void prefetch_keys(const DecodeRow& row,
                              const DecoderLayer& layer,
                              const AttentionShare& share,
                              const std::int32_t* blocks) {
  constexpr int kLine = 128 / sizeof(Bf16);
  constexpr int kLines = kDim / kLine;  // of a key
  const int first = share.first_tile * kTile;
  const int count = min(share.end_tile * kTile, share.length - 1) - first;
  for (int i = static_cast<int>(threadIdx.x); i < count * kLines; i += kThreads) {
    const auto offset =
        cache_offset<kDim>(blocks, i / kLines, row.shape.groups, share.group) + i % kLines * kLine;
    prefetch(static_cast<const Bf16*>(layer.key_cache) + offset);
    prefetch(static_cast<const Bf16*>(layer.value_cache) + offset);
  }
}

// Prepares the row's own queries, key and value, each head by one warp: queries and key are normed,
// if there is a weight, and turned. The key and the value are stored in the cache, too.
template <int kDim>
__device__ void receive_heads(const DecodeRow& row,
                              const DecoderLayer& layer,
                              const AttentionShare& share,
                              const Exchange& exchange,
                              std::uint32_t tag,
                              AttentionMemory& memory) {
  constexpr int kHalf = kDim / 2;
  constexpr int kLanesOfHead = kHalf / 2;
  const auto& shape = row.shape;
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int heads_of_group = shape.heads / shape.groups;
  const bool last = share.end_tile * kTile >= share.length;
  const std::int64_t slot = *row.slot;
  for (int task = warp; task < share.heads + (last ? 2 : 0); task += kWarps) {
    const bool is_key = task == share.heads;
    const bool is_value = task > share.heads;
    const int head = share.group * (heads_of_group + 2) + (is_key     ? heads_of_group
                                                           : is_value ? heads_of_group + 1
                                                                      : share.first_head + task);
    const bool works = lane < kLanesOfHead;
    const int at[] = {lane * 2, lane * 2 + 1, lane * 2 + kHalf, lane * 2 + 1 + kHalf};
    const void* const norm = is_value ? nullptr : is_key ? layer.k_norm : layer.q_norm;
    float by[4];
    float cos[4];
    float sin[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      by[j] = works && norm != nullptr ? widen(static_cast<const Bf16*>(norm)[at[j]]) : 0;
      cos[j] = works ? widen(static_cast<const Bf16*>(row.cos)[at[j]]) : 0;
      sin[j] = works ? widen(static_cast<const Bf16*>(row.sin)[at[j]]) : 0;
    }
    float x[4] = {};
    if (works) {
      const auto* const words = exchange.results[kQkv] + head * kHalf + lane;
      PairWord low;
      PairWord high;
      do {
        low = peek(words);
        high = peek(words + kLanesOfHead);
      } while (low.tag != tag || high.tag != tag);
      x[0] = low_half(low.pair);
      x[1] = high_half(low.pair);
      x[2] = low_half(high.pair);
      x[3] = high_half(high.pair);
    }
    __syncwarp();
    if (norm != nullptr) {
      float sum = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) sum = fmaf(x[j], x[j], sum);
      const float inverse = rsqrtf(add_lanes(sum) / static_cast<float>(kDim) + shape.epsilon);
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = rounded<Bf16>(by[j] * rounded<Bf16>(x[j] * inverse));
    }
    if (!is_value) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float u = x[j];
        const float v = x[j + 2];
        x[j] = rounded<Bf16>(rounded<Bf16>(u * cos[j]) - rounded<Bf16>(v * sin[j]));
        x[j + 2] = rounded<Bf16>(rounded<Bf16>(v * cos[j + 2]) + rounded<Bf16>(u * sin[j + 2]));
      }
    }
    if (!works) continue;
    if (!is_key && !is_value) {
      const float to_exponent = shape.scale * static_cast<float>(M_LOG2E);
#pragma unroll
      for (int j = 0; j < 4; ++j) memory.query[task][at[j]] = x[j] * to_exponent;
      continue;
    }
    auto* const own = is_key ? memory.key : memory.value;
    auto* const cache = static_cast<Bf16*>(is_key ? layer.key_cache : layer.value_cache) +
                        (slot * shape.groups + share.group) * kDim;
    const std::uint32_t pairs[] = {pack(x[0], x[1]), pack(x[2], x[3])};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      reinterpret_cast<std::uint32_t*>(own)[lane + half * kLanesOfHead] = pairs[half];
      if (slot >= 0 && share.first_head == 0)
        reinterpret_cast<std::uint32_t*>(cache)[lane + half * kLanesOfHead] = pairs[half];
    }
  }
}

// Attention of the share's heads to its keys.
template <int kDim>
__device__ void attend(const DecodeRow& row,
                       const DecoderLayer& layer,
                       const AttentionShare& share,
                       const std::int32_t* blocks,
                       const Exchange& exchange,
                       std::uint32_t tag,
                       AttentionMemory& memory) {
  using Parts = TileParts<kDim>;
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / kLanes;
  const int lane = thread % kLanes;
  uint4 keys[Parts::kCount];  // the first tile's wait for nothing
  load_keys<kDim>(row, layer.key_cache, share, share.first_tile, blocks, keys);
  receive_heads<kDim>(row, layer, share, exchange, tag, memory);
  sync();

  float maximum = -INFINITY;  // of head `warp`
  float sum = 0;
  float result[kMostHeads][kChunk] = {};
  for (int tile = share.first_tile; tile < share.end_tile; ++tile) {
    const int own = share.length - 1 - tile * kTile;  // the row's own key, if below kTile
    {
      const int key = thread / kLanesOfKey;
      const int part = thread % kLanesOfKey;
      const int position = tile * kTile + key;
      const bool exists = position >= share.first_key && position < share.length;
      float score[kMostHeads] = {};
#pragma unroll
      for (int c = 0; c < Parts::kCount; ++c) {
        float k[kChunk];
        const int chunk = part + c * kLanesOfKey;
        uint4 of_key = keys[c];
        if (key == own) of_key = reinterpret_cast<const uint4*>(memory.key)[chunk];
        widen_chunk(of_key, k);
#pragma unroll
        for (int head = 0; head < kMostHeads; ++head) {
          if (head >= share.heads) continue;
          const auto* const q = memory.query[head] + chunk * kChunk;
#pragma unroll
          for (int j = 0; j < kChunk; ++j) score[head] = fmaf(q[j], k[j], score[head]);
        }
      }
#pragma unroll
      for (int head = 0; head < kMostHeads; ++head) {
        if (head >= share.heads) continue;
#pragma unroll
        for (int distance = kLanesOfKey / 2; distance > 0; distance /= 2)
          score[head] += __shfl_xor_sync(0xffffffffu, score[head], distance);
        if (part == 0) memory.weights[head][key] = exists ? score[head] : -INFINITY;
      }
    }
    uint4 values[Parts::kCount];
    load_values<kDim>(row, layer.value_cache, share, tile, blocks, values);
    sync();
    if (warp < share.heads) {  // weights: a warp a head
      auto* const weights = memory.weights[warp];
      constexpr int kOfLane = kTile / kLanes;
      float scores[kOfLane];
      float now = maximum;
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        scores[i] = weights[lane + i * kLanes];
        now = fmaxf(now, scores[i]);
      }
      now = largest_of_lanes(now);
      const float shift = now == -INFINITY ? 0 : now;
      const float growth = exp2f(maximum - shift);
      float more_sum = 0;
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        const float weight = exp2f(scores[i] - shift);
        more_sum += weight;
        weights[lane + i * kLanes] = weight;
      }
      maximum = now;
      sum = sum * growth + add_lanes(more_sum);
      if (lane == 0) {
        memory.growth[warp] = growth;
        memory.statistics[warp] = {maximum, sum};
      }
    }
    sync();
    if (tile + 1 < share.end_tile)
      load_keys<kDim>(row, layer.key_cache, share, tile + 1, blocks, keys);
#pragma unroll
    for (int head = 0; head < kMostHeads; ++head) {
      if (head >= share.heads) continue;
      const float growth = memory.growth[head];
#pragma unroll
      for (int j = 0; j < kChunk; ++j) result[head][j] *= growth;
    }
#pragma unroll
    for (int i = 0; i < Parts::kCount; ++i) {
      const int key = thread / Parts::kChunks + i * Parts::kKeysApart;
      float v[kChunk];
      uint4 of_key = values[i];
      if (key == own)
        of_key = reinterpret_cast<const uint4*>(memory.value)[thread % Parts::kChunks];
      widen_chunk(of_key, v);
#pragma unroll
      for (int head = 0; head < kMostHeads; ++head) {
        if (head >= share.heads) continue;
        const float weight = memory.weights[head][key];
#pragma unroll
        for (int j = 0; j < kChunk; ++j) result[head][j] = fmaf(weight, v[j], result[head][j]);
      }
    }
    sync();
  }

  // Over the keys of a warp, then over warps.
  const int first_head = share.group * (row.shape.heads / row.shape.groups) + share.first_head;
  constexpr int kTriples = triples_of(kDim);
#pragma unroll
  for (int head = 0; head < kMostHeads; ++head) {
    auto& r = result[head];
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
#pragma unroll
      for (int distance = kLanes / 2; distance >= Parts::kChunks; distance /= 2)
        r[j] += __shfl_xor_sync(0xffffffffu, r[j], distance);
    }
    if (lane < Parts::kChunks) {
      auto* const to = reinterpret_cast<float4*>(memory.results[warp][head] + lane * kChunk);
      to[0] = {r[0], r[1], r[2], r[3]};
      to[1] = {r[4], r[5], r[6], r[7]};
    }
  }
  sync();
  const int head = thread / (kTriples + 1);
  const int triple = thread % (kTriples + 1);
  if (head < share.heads) {
    TripleWord word{.values = {}, .tag = tag};
    if (triple == kTriples) {
      word.values[0] = memory.statistics[head].x;
      word.values[1] = memory.statistics[head].y;
    } else {
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
#pragma unroll
        for (int j = 0; j < kOfTriple; ++j)
          word.values[j] += memory.results[w][head][min(triple * kOfTriple + j, kDim - 1)];
      }
    }
    publish(exchange.attended +
                (static_cast<std::int64_t>(first_head + head) * kMostSplits + share.split) *
                    (kTriples + 1) +
                triple,
            word);
  }
}

// Combines the splits of each head into `attended`, [heads, dim].
template <int kDim>
__device__ void combine_splits(const DecodeRowShape& shape,
                               int splits,
                               const Exchange& exchange,
                               std::uint32_t tag,
                               Bf16* attended) {
  constexpr int kTriples = triples_of(kDim);
  constexpr int kAtOnce = 4;
  for (int i = static_cast<int>(threadIdx.x); i < shape.heads * kTriples; i += kThreads) {
    const int head = i / kTriples;
    const int triple = i % kTriples;
    const auto* const words =
        exchange.attended + static_cast<std::int64_t>(head) * kMostSplits * (kTriples + 1);
    float maximum = -INFINITY;
    float sum = 0;
    float result[kOfTriple] = {};
    for (int first = 0; first < splits; first += kAtOnce) {
      TripleWord parts[kAtOnce];
      TripleWord statistics[kAtOnce];
      bool there;
      do {
        there = true;
#pragma unroll
        for (int s = 0; s < kAtOnce; ++s) {
          const auto* const of_split = words + min(first + s, splits - 1) * (kTriples + 1);
          parts[s] = peek(of_split + triple);
          statistics[s] = peek(of_split + kTriples);
        }
#pragma unroll
        for (int s = 0; s < kAtOnce; ++s)
          there = there && parts[s].tag == tag && statistics[s].tag == tag;
      } while (!there);
#pragma unroll
      for (int s = 0; s < kAtOnce; ++s) {
        if (first + s >= splits) continue;
        const float now = fmaxf(maximum, statistics[s].values[0]);
        const float old_weight = exp2f(maximum - now);
        const float weight = exp2f(statistics[s].values[0] - now);
        maximum = now;
        sum = sum * old_weight + statistics[s].values[1] * weight;
#pragma unroll
        for (int j = 0; j < kOfTriple; ++j)
          result[j] = result[j] * old_weight + parts[s].values[j] * weight;
      }
    }
    const float factor = sum > 0 ? 1 / sum : 0;
#pragma unroll
    for (int j = 0; j < kOfTriple; ++j) {
      const int channel = triple * kOfTriple + j;
      if (channel < kDim) attended[head * kDim + channel] = narrow<Bf16>(result[j] * factor);
    }
  }
  sync();
}

}  // namespace
}  // namespace ferry::models::launch
