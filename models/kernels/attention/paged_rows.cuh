// The rows of a group's heads, at most 16, of one sequence that is decoded, by one thread block. It
// replays the order of FlashAttention-2's forward kernel (Dao 2023, algorithm 1;
// csrc/flash_attn/src/flash_fwd_kernel.h, softmax.h): key blocks of the same size from the last to
// the first, scores by m16n8k16 products along the channels, a running maximum, the sum of a row by
// four chains of the columns that one lane of that instruction holds. Work that flash leaves to one
// warp is shared out over four where no order is lost: scores by keys, the result by channels, the
// chains of sums by rows.
//
// The blocks of a cluster share out the keys of a sequence where the order does not matter and rows
// are few (Dao et al. 2023, Flash-Decoding). They join what they have through each other's shared
// memory.
#pragma once

#include <cooperative_groups.h>

#include <cmath>

#include "models/kernels/attention/attention_tiles.cuh"
#include "models/kernels/cuda/cuda_element.cuh"

namespace ferry::models::launch {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kLanes;
constexpr int kMultiprocessors = 132;
constexpr int kMostShares = 8;          // blocks that every GPU has as a cluster
constexpr int kLeastBlocksOfShare = 4;  // of keys, that are worth joining

// kDim: channels of a key, kValues: of a value.
template <int kDim, int kValues, int kKeys, int kStages>
struct Shared {
  alignas(16) __nv_bfloat16 key[kStages][kKeys * kDim];
  alignas(16) __nv_bfloat16 value[kStages][kKeys * kValues];
  alignas(16) __nv_bfloat16 weights[kRows * kKeys];  // rounded, as they multiply values
  float exact[kRows][kKeys + kQuad];                 // before that, as they are summed
  float maximum[kWarps][kRows];
  float inverse_sum[kRows];
};

// The share of a block of a cluster in a sequence's result. It lies where keys did.
template <int kDim, int kShareRows = kRows>
struct Share {
  float result[kShareRows][kDim];  // of weights relative to the maximum
  float maximum[kShareRows];
  float sum[kShareRows];
};

struct PagedArguments {
  const __nv_bfloat16* query;
  const __nv_bfloat16* key;
  const __nv_bfloat16* value;
  const std::int32_t* block_tables;
  const std::int32_t* lengths;
  const __nv_bfloat16* sinks;  // or null
  __nv_bfloat16* result;
  PagedAttentionShape shape;
  float scale_log2;
};

// Joins the shares of a cluster's blocks, in their order: each block a part of the result. Shares
// from `count` on are of no keys.
template <int kDim, int kShareRows>
__device__ void join_shares(const PagedArguments& a,
                            Share<kDim, kShareRows>& mine,
                            int count,
                            int rows,
                            int group_row,
                            __nv_bfloat16* to) {
  const auto cluster = cooperative_groups::this_cluster();
  cluster.sync();
  const int blocks = static_cast<int>(cluster.num_blocks());
  const int threads = static_cast<int>(blockDim.x);
  const int first = static_cast<int>(cluster.block_rank()) * threads;
  for (int i = first + static_cast<int>(threadIdx.x); i < rows * kDim / 2; i += blocks * threads) {
    const int row = i / (kDim / 2);
    const int channel = i % (kDim / 2) * 2;
    float maxima[kMostShares];
    float sums[kMostShares];
    float2 values[kMostShares];
    float maximum = -INFINITY;
#pragma unroll
    for (int block = 0; block < kMostShares; ++block) {  // all on their way at once
      if (block >= count) break;
      const auto& share = *cluster.map_shared_rank(&mine, block);
      maxima[block] = share.maximum[row];
      sums[block] = share.sum[row];
      values[block] = *reinterpret_cast<const float2*>(&share.result[row][channel]);
    }
#pragma unroll
    for (int block = 0; block < kMostShares; ++block) {
      if (block >= count) break;
      maximum = fmaxf(maximum, maxima[block]);
    }
    float sum = 0;
    float low = 0;
    float high = 0;
#pragma unroll
    for (int block = 0; block < kMostShares; ++block) {
      if (block >= count) break;
      const float factor = exp2f((maxima[block] - maximum) * a.scale_log2);
      sum += factor * sums[block];
      low += factor * values[block].x;
      high += factor * values[block].y;
    }
    if (a.sinks != nullptr)
      sum += exp2f(widen(a.sinks[group_row + row]) * static_cast<float>(M_LOG2E) -
                   maximum * a.scale_log2);
    const float factor = sum == 0 || sum != sum ? 1.0F : 1.0F / sum;
    *reinterpret_cast<__nv_bfloat162*>(to + row * kDim + channel) =
        __floats2bfloat162_rn(low * factor, high * factor);
  }
  cluster.sync();  // until here others read
}

// Rows of one block: heads of one group, of one sequence.
struct RowTile {
  int sequence;
  int group;
  int group_row;  // the first head, of all heads
  int rows;
  std::int64_t first_head;  // the first of `rows`, of the heads of all sequences
  int length;
};
template <int kTileRows = kRows>
__device__ RowTile tile_of(const PagedArguments& a, int index, int sequence) {
  const int heads_of_group = a.shape.heads / a.shape.groups;
  const int tiles = ceil_div(heads_of_group, kTileRows);
  const int group = index / tiles;
  const int first_row = index % tiles * kTileRows;
  const int group_row = group * heads_of_group + first_row;
  return {.sequence = sequence,
          .group = group,
          .group_row = group_row,
          .rows = min(kTileRows, heads_of_group - first_row),
          .first_head = static_cast<std::int64_t>(sequence) * a.shape.heads + group_row,
          .length = a.lengths[sequence]};
}
__device__ inline const std::int32_t* table_of(const PagedArguments& a, const RowTile& tile) {
  return a.block_tables + static_cast<std::int64_t>(tile.sequence) * a.shape.max_blocks;
}
__device__ inline int first_key_of(const PagedArguments& a, const RowTile& tile) {
  return a.shape.window > 0 ? max(0, tile.length - a.shape.window) : 0;
}
// The number in a cache of a group's key or value of a position.
__device__ inline std::int64_t place_of(const PagedArguments& a,
                                        const std::int32_t* table,
                                        int position,
                                        int group) {
  const std::int64_t slot = static_cast<std::int64_t>(table[position / kCacheBlock]) * kCacheBlock +
                            position % kCacheBlock;
  return slot * a.shape.groups + group;
}
// Zeros for a sequence without keys.
template <int kDim>
__device__ void write_zeros(const PagedArguments& a, const RowTile& tile) {
  for (int i = static_cast<int>(threadIdx.x); i < tile.rows * kDim;
       i += static_cast<int>(blockDim.x))
    a.result[tile.first_head * kDim + i] = __float2bfloat16_rn(0);
}
// This lane's part of 16 rows of the query, `first` and those behind; zeros for rows that there are
// not.
template <int kDim>
__device__ void load_query(Fragment (&query)[kDim / kDepth],
                           const PagedArguments& a,
                           const RowTile& tile,
                           int first = 0) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
#pragma unroll
  for (int step = 0; step < kDim / kDepth; ++step) {
    for (int part = 0; part < 4; ++part) {
      const int row = first + lane / kQuad + (part % 2) * (kRows / 2);
      const int column = step * kDepth + lane % kQuad * 2 + (part / 2) * (kDepth / 2);
      query[step][part] = row < tile.rows ? *reinterpret_cast<const std::uint32_t*>(
                                                a.query + (tile.first_head + row) * kDim + column)
                                          : 0;
    }
  }
}

// Begins to load a block of keys and their values; the end of one is waited for by its number.
template <int kDim, int kValues, int kKeys>
__device__ void load_block(const PagedArguments& a,
                           __nv_bfloat16* key,
                           __nv_bfloat16* value,
                           int block,
                           int length,
                           const std::int32_t* table,
                           int group) {
  constexpr int kChunks = kDim / kChunk;
  const Tile<kDim> keys{key};
  const Tile<kValues> values{value};
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < kKeys * kChunks; i += kThreads) {
    const int row = i / kChunks;
    const int chunk = i % kChunks;
    const int position = block * kKeys + row;
    const bool exists = position < length;
    const std::int64_t at = exists ? place_of(a, table, position, group) : 0;
    const auto begin = [&](int channels) { return exists ? at * channels + chunk * kChunk : 0; };
    copy_async(keys.chunk(row, chunk), a.key + begin(kDim), exists);
    if (chunk < kValues / kChunk)
      copy_async(values.chunk(row, chunk), a.value + begin(kValues), exists);
  }
}

// Hides the scores of keys before `first_key` and from `end` on from the rows; those of this warp
// begin with the key of `position`. Writes the largest score of each of its 16 rows.
template <int kTiles>
__device__ void keep_maxima(
    float (&scores)[kTiles][4], int position, int first_key, int end, float* largest) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  float of_row[2] = {-INFINITY, -INFINITY};
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = position + tile * kColumns + lane % kQuad * 2 + i % 2;
      if (at >= end || at < first_key) scores[tile][i] = -INFINITY;
      of_row[i / 2] = fmaxf(of_row[i / 2], scores[tile][i]);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    for (int distance = kQuad / 2; distance > 0; distance /= 2)
      of_row[half] = fmaxf(of_row[half], __shfl_xor_sync(0xffffffffu, of_row[half], distance));
    if (lane % kQuad == 0) largest[lane / kQuad + half * 8] = of_row[half];
  }
}

// Makes of the first and last block of keys those of this thread block's share, which may have
// none. Returns the shares that have some.
__device__ inline int take_share(int& first_block, int& last_block) {
  const int shares = static_cast<int>(cooperative_groups::this_cluster().num_blocks());
  const int blocks = last_block - first_block + 1;
  const int of_share = max(kLeastBlocksOfShare, ceil_div(blocks, shares));
  last_block -= static_cast<int>(blockIdx.x) % shares * of_share;
  first_block = max(first_block, last_block - of_share + 1);
  return ceil_div(blocks, of_share);
}

// kStages: blocks of keys in shared memory, all but one of which are on their way. kShares: the
// blocks of a cluster each have a part of the keys.
template <int kDim, int kValues, int kKeys, int kStages, bool kShares>
__device__ void attend(const PagedArguments& a,
                       const RowTile& of,
                       Shared<kDim, kValues, kKeys, kStages>& shared) {
  constexpr int kKeysOfWarp = kKeys / kWarps;
  constexpr int kScoreTiles = kKeysOfWarp / kColumns;
  constexpr int kChannelsOfWarp = kValues / kWarps;
  constexpr int kResultTiles = kChannelsOfWarp / kColumns;
  constexpr int kSteps = kDim / kDepth;
  const int group = of.group;
  const int rows = of.rows;
  const std::int64_t first_head = of.first_head;
  const int length = of.length;
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / kLanes;
  const int lane = thread % kLanes;
  const int quad_row = lane / kQuad;  // the lane's rows: this one, and that 8 behind
  const int quad_lane = lane % kQuad;
  const auto* const table = table_of(a, of);
  const int first_key = first_key_of(a, of);
  int last_block = (length - 1) / kKeys;
  int first_block = first_key / kKeys;
  int shares_with_keys = 1;
  if constexpr (kShares) {
    shares_with_keys = take_share(first_block, last_block);
    if (shares_with_keys == 1 && last_block < first_block) return;  // nobody reads its share
  }
  // The copies of each block form one group; blocks before the first get an empty group.
  const auto load = [&](int block) {
    const int stage = (last_block - block) % kStages;
    if (block >= first_block) {
      load_block<kDim, kValues, kKeys>(a, shared.key[stage], shared.value[stage], block, length,
                                       table, group);
    }
    commit_copies();
  };
  for (int ahead = 0; ahead < kStages - 1; ++ahead) load(last_block - ahead);

  Fragment query[kSteps];
  load_query<kDim>(query, a, of);
  float result[kResultTiles][4] = {};
  float maximum[2] = {-INFINITY, -INFINITY};  // of the lane's two rows
  // The chains of sums: thread t < 64 has that of row t / 4, columns 8 i + 2 (t % 4) and the next.
  const bool sums = thread < kRows * kQuad;
  const int summed_row = thread / kQuad;
  float sum = 0;
  float summed_maximum = -INFINITY;

  for (int block = last_block; block >= first_block; --block) {
    const int stage = (last_block - block) % kStages;
    wait_for_all_but<kStages - 2>();
    __syncthreads();  // this block is there, and all have read what the last one was
    load(block - (kStages - 1));

    // Scores of this warp's keys.
    float scores[kScoreTiles][4] = {};
    const Tile<kDim> keys{shared.key[stage]};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int pair = 0; pair < kScoreTiles; pair += 2) {
        Fragment b;  // of two tiles: channels below and above 8 of each
        const int row = warp * kKeysOfWarp + pair * kColumns + lane % 8 + lane / 16 * 8;
        load_matrices(b, keys.chunk(row, step * 2 + lane / 8 % 2));
        multiply_add(scores[pair], query[step], b[0], b[1]);
        multiply_add(scores[pair + 1], query[step], b[2], b[3]);
      }
    }
    keep_maxima(scores, block * kKeys + warp * kKeysOfWarp, first_key, length,
                shared.maximum[warp]);
    __syncthreads();
    const auto maximum_of = [&](int row, float before) {
      float now = before;
      for (int i = 0; i < kWarps; ++i) now = fmaxf(now, shared.maximum[i][row]);
      return now;
    };

    // The weights of the scores, and the factor by which the maximum's growth scales earlier sums.
    float growth[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = quad_row + half * 8;
      const float now = maximum_of(row, maximum[half]);
      growth[half] = exp2f(__fmul_rn(__fsub_rn(maximum[half], now), a.scale_log2));
      maximum[half] = now;
      const float shift = __fmul_rn(now, a.scale_log2);
#pragma unroll
      for (int tile = 0; tile < kScoreTiles; ++tile) {
        const int column = warp * kKeysOfWarp + tile * kColumns + quad_lane * 2;
        const float low = exp2f(__fsub_rn(__fmul_rn(scores[tile][half * 2], a.scale_log2), shift));
        const float high =
            exp2f(__fsub_rn(__fmul_rn(scores[tile][half * 2 + 1], a.scale_log2), shift));
        shared.exact[row][column] = low;
        shared.exact[row][column + 1] = high;
        const Tile<kKeys> weights{shared.weights};
        auto* const to = weights.chunk(row, column / kChunk) + column % kChunk;
        *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(low, high);
      }
    }
    float sum_growth = 0;
    if (sums) {
      const float now = maximum_of(summed_row, summed_maximum);
      sum_growth = exp2f(__fmul_rn(__fsub_rn(summed_maximum, now), a.scale_log2));
      summed_maximum = now;
    }
    __syncthreads();

    if (sums) {  // with the one multiply-add that flash's compiler makes
      sum = __fmaf_rn(sum, sum_growth, shared.exact[summed_row][thread % kQuad * 2]);
      sum = __fadd_rn(sum, shared.exact[summed_row][thread % kQuad * 2 + 1]);
#pragma unroll
      for (int tile = 1; tile < kKeys / kColumns; ++tile) {
        const int column = tile * kColumns + thread % kQuad * 2;
        sum = __fadd_rn(sum, shared.exact[summed_row][column]);
        sum = __fadd_rn(sum, shared.exact[summed_row][column + 1]);
      }
    }
    // The result in this warp's channels.
#pragma unroll
    for (int tile = 0; tile < kResultTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) result[tile][i] = __fmul_rn(result[tile][i], growth[i / 2]);
    }
    const Tile<kValues> values{shared.value[stage]};
    const Tile<kKeys> weights{shared.weights};
#pragma unroll
    for (int step = 0; step < kKeys / kDepth; ++step) {
      Fragment of_rows;
      load_matrices(of_rows, weights.chunk(lane % 16, step * 2 + lane / 16));
#pragma unroll
      for (int pair = 0; pair < kResultTiles; pair += 2) {
        Fragment b;
        const int channel = warp * kChannelsOfWarp + pair * kColumns + lane / 16 * kColumns;
        load_matrices_transposed(b, values.chunk(step * kDepth + lane % 16, channel / kChunk));
        multiply_add(result[pair], of_rows, b[0], b[1]);
        multiply_add(result[pair + 1], of_rows, b[2], b[3]);
      }
    }
  }

  if (sums) {
    for (int distance = kQuad / 2; distance > 0; distance /= 2)
      sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, distance));
  }
  if (kShares && shares_with_keys > 1) {
    static_assert(sizeof(Share<kValues>) <= sizeof(shared.key));
    auto& mine = *reinterpret_cast<Share<kValues>*>(shared.key);
    wait_for_all_but<0>();
    __syncthreads();  // all have read their keys
#pragma unroll
    for (int tile = 0; tile < kResultTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int channel = warp * kChannelsOfWarp + tile * kColumns + quad_lane * 2;
        *reinterpret_cast<float2*>(&mine.result[quad_row + half * 8][channel]) =
            make_float2(result[tile][half * 2], result[tile][half * 2 + 1]);
      }
    }
    if (sums && thread % kQuad == 0) {
      mine.maximum[summed_row] = summed_maximum;
      mine.sum[summed_row] = sum;
    }
    join_shares(a, mine, shares_with_keys, rows, of.group_row, a.result + first_head * kValues);
    return;
  }
  if (sums) {
    if (a.sinks != nullptr && summed_row < rows) {
      const float sink = widen(a.sinks[of.group_row + summed_row]);
      sum += exp2f(sink * static_cast<float>(M_LOG2E) - summed_maximum * a.scale_log2);
    }
    if (thread % kQuad == 0)
      shared.inverse_sum[summed_row] = sum == 0 || sum != sum ? 1.0F : __fdiv_rn(1.0F, sum);
  }
  __syncthreads();
#pragma unroll
  for (int tile = 0; tile < kResultTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = quad_row + half * 8;
      if (row >= rows) continue;
      const int channel = warp * kChannelsOfWarp + tile * kColumns + quad_lane * 2;
      const float factor = shared.inverse_sum[row];
      *reinterpret_cast<__nv_bfloat162*>(a.result + (first_head + row) * kValues + channel) =
          __floats2bfloat162_rn(__fmul_rn(result[tile][half * 2], factor),
                                __fmul_rn(result[tile][half * 2 + 1], factor));
    }
  }
}

// Thread blocks of a cluster for each of `blocks`, so that they fill each multiprocessor about
// twice.
inline int shares_of(int blocks) {
  int shares = 1;
  while (shares < kMostShares && blocks * shares <= kMultiprocessors) shares *= 2;
  return shares;
}

// Launches clusters of `cluster` blocks for each block of `grid`, or no clusters.
inline cudaError_t launch_rows(void (*kernel)(PagedArguments),
                               std::size_t bytes,
                               int cluster,
                               const PagedArguments& arguments,
                               dim3 grid,
                               cudaStream_t stream,
                               int threads = kThreads) {
  const auto blocks = static_cast<unsigned>(cluster);
  grid.x *= blocks;
  return launch_dependent_clusters(kernel, blocks, grid, threads, bytes, stream, arguments);
}

// The kernel for latents: keys of 576 channels, whose first 512 are the values (paged_latents.cu).
cudaError_t paged_latents(const PagedArguments& arguments, cudaStream_t stream);

}  // namespace ferry::models::launch
