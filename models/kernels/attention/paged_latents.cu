// Attention of decoded rows to latents (DeepSeek-V2, arXiv 2405.04434, 2.1.2): all heads of a
// sequence read the same keys, whose first channels are the values, so that a key is loaded once
// for up to 32 heads and both products. The heads of a thread block share the keys' scores out over
// its warps, the result by channels. The blocks of a cluster share out the keys of a sequence.
#include "models/kernels/attention/paged_rows.cuh"

namespace ferry::models::launch {
namespace {

constexpr int kLatent = 512;              // channels of a latent: the values
constexpr int kLatentKey = kLatent + 64;  // with the rotated ones
constexpr int kLatentKeys = kCacheBlock;  // of a tile: a block of the cache
constexpr int kLatentStages = 3;          // tiles in shared memory
constexpr int kLatentWarps = 8;
constexpr int kLatentThreads = kLatentWarps * kLanes;

// kTiles: times 16 heads.
template <int kTiles>
struct LatentShared {
  static constexpr int kHeads = kTiles * kRows;
  static constexpr int kWarpsOfTile = kLatentWarps / kTiles;  // that share out its keys
  alignas(16) __nv_bfloat16 key[kLatentStages][kLatentKeys * kLatentKey];
  alignas(16) __nv_bfloat16 weights[kHeads * kLatentKeys];  // rounded, as they multiply values
  float maximum[kWarpsOfTile][kHeads];
  float sum[kWarpsOfTile][kHeads];
};

// Begins to load a block of so many keys, and zeros behind them.
__device__ inline void load_latents(const __nv_bfloat16* from, __nv_bfloat16* to, int keys) {
  constexpr int kChunks = kLatentKey / kChunk;
  const Tile<kLatentKey> tile{to};
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < kLatentKeys * kChunks; i += kLatentThreads) {
    const int row = i / kChunks;
    const bool exists = row < keys;
    copy_async(tile.chunk(row, i % kChunks), from + (exists ? i * kChunk : 0), exists);
  }
}

template <int kTiles>
__global__ __launch_bounds__(kLatentThreads) void paged_latents_kernel(PagedArguments a) {
  using Memory = LatentShared<kTiles>;
  constexpr int kHeads = Memory::kHeads;
  constexpr int kWarpsOfTile = Memory::kWarpsOfTile;
  constexpr int kKeysOfWarp = kLatentKeys / kWarpsOfTile;
  constexpr int kScoreTiles = kKeysOfWarp / kColumns;
  constexpr int kSteps = kLatentKey / kDepth;
  constexpr int kChannelsOfWarp = kLatent / kLatentWarps;
  constexpr int kResultTiles = kChannelsOfWarp / kColumns;
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<Memory*>(memory);
  release_dependents();
  wait_for_inputs();
  const int shares = static_cast<int>(cooperative_groups::this_cluster().num_blocks());
  const auto of =
      tile_of<kHeads>(a, static_cast<int>(blockIdx.x) / shares, static_cast<int>(blockIdx.y));
  if (of.length == 0) return write_zeros<kLatent>(a, of);
  int first_block = 0;
  int last_block = (of.length - 1) / kLatentKeys;
  const int shares_with_keys = take_share(first_block, last_block);
  if (shares_with_keys == 1 && last_block < first_block) return;  // nobody reads its share
  const auto* const table = table_of(a, of);
  const auto load = [&](int block) {
    if (block >= first_block)
      load_latents(a.key + static_cast<std::int64_t>(table[block]) * kLatentKeys * kLatentKey,
                   shared.key[(last_block - block) % kLatentStages],
                   of.length - block * kLatentKeys);
    commit_copies();
  };
  for (int ahead = 0; ahead < kLatentStages - 1; ++ahead) load(last_block - ahead);

  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int quad_row = lane / kQuad;  // the lane's rows of 16: this one, and that 8 behind
  const int quad_lane = lane % kQuad;
  const int scored = warp / kWarpsOfTile * kRows;  // the first of the heads that it scores
  const int part = warp % kWarpsOfTile;            // of the keys
  Fragment query[kSteps];
  load_query<kLatentKey>(query, a, of, scored);
  float result[kTiles][kResultTiles][4] = {};
  float maximum[kTiles][2];
  for (auto& of_tile : maximum) of_tile[0] = of_tile[1] = -INFINITY;
  float sum[2] = {};  // of the scored heads' weights in this lane's columns

  for (int block = last_block; block >= first_block; --block) {
    wait_for_all_but<kLatentStages - 2>();
    __syncthreads();  // this block is there, and all have read what the last one was
    load(block - (kLatentStages - 1));
    const Tile<kLatentKey> keys{shared.key[(last_block - block) % kLatentStages]};

    float scores[kScoreTiles][4] = {};
    float odd_scores[kScoreTiles][4] = {};  // a chain of their own
#pragma unroll
    for (int step = 0; step < kSteps; step += 2) {
#pragma unroll
      for (int tile = 0; tile < kScoreTiles; ++tile) {
        Fragment b;  // two steps' channels of eight keys
        const int row = part * kKeysOfWarp + tile * kColumns + lane % 8;
        load_matrices(b, keys.chunk(row, step * 2 + lane / 8));
        multiply_add(scores[tile], query[step], b[0], b[1]);
        multiply_add(odd_scores[tile], query[step + 1], b[2], b[3]);
      }
    }
#pragma unroll
    for (int tile = 0; tile < kScoreTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[tile][i] += odd_scores[tile][i];
    }
    keep_maxima(scores, block * kLatentKeys + part * kKeysOfWarp, 0, of.length,
                shared.maximum[part] + scored);
    __syncthreads();

    // The factors by which the maxima's growth scales earlier results, and the weights.
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int head = tile * kRows + quad_row + half * 8;
        float now = maximum[tile][half];
#pragma unroll
        for (int i = 0; i < kWarpsOfTile; ++i) now = fmaxf(now, shared.maximum[i][head]);
        const float growth = exp2f((maximum[tile][half] - now) * a.scale_log2);
        maximum[tile][half] = now;
#pragma unroll
        for (int i = 0; i < kResultTiles; ++i) {
          result[tile][i][half * 2] *= growth;
          result[tile][i][half * 2 + 1] *= growth;
        }
        if (tile != scored / kRows) continue;
        sum[half] *= growth;
        const float shift = now * a.scale_log2;
        const Tile<kLatentKeys> weights{shared.weights};
#pragma unroll
        for (int i = 0; i < kScoreTiles; ++i) {
          const int column = part * kKeysOfWarp + i * kColumns + quad_lane * 2;
          const float low = exp2f(fmaf(scores[i][half * 2], a.scale_log2, -shift));
          const float high = exp2f(fmaf(scores[i][half * 2 + 1], a.scale_log2, -shift));
          sum[half] += low + high;
          *reinterpret_cast<__nv_bfloat162*>(weights.chunk(head, column / kChunk) +
                                             column % kChunk) = __floats2bfloat162_rn(low, high);
        }
      }
    }
    __syncthreads();

    const Tile<kLatentKeys> weights{shared.weights};
#pragma unroll
    for (int step = 0; step < kLatentKeys / kDepth; ++step) {
      Fragment of_rows[kTiles];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
        load_matrices(of_rows[tile], weights.chunk(tile * kRows + lane % 16, step * 2 + lane / 16));
#pragma unroll
      for (int pair = 0; pair < kResultTiles; pair += 2) {
        Fragment b;
        const int channel = warp * kChannelsOfWarp + (pair + lane / 16) * kColumns;
        load_matrices_transposed(b, keys.chunk(step * kDepth + lane % 16, channel / kChunk));
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          multiply_add(result[tile][pair], of_rows[tile], b[0], b[1]);
          multiply_add(result[tile][pair + 1], of_rows[tile], b[2], b[3]);
        }
      }
    }
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    for (int distance = kQuad / 2; distance > 0; distance /= 2)
      sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], distance);
    if (quad_lane == 0) shared.sum[part][scored + quad_row + half * 8] = sum[half];
  }
  wait_for_all_but<0>();
  __syncthreads();  // the sums are there, and all have read their keys
  const auto sum_of = [&](int head) {
    float all = 0;
    for (int i = 0; i < kWarpsOfTile; ++i) all += shared.sum[i][head];
    return all;
  };
  // Calls `store` with each head and channel that this lane has two numbers of.
  const auto for_each = [&](const auto& store) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < kResultTiles; ++i)
          store(tile * kRows + quad_row + half * 8,
                warp * kChannelsOfWarp + i * kColumns + quad_lane * 2, result[tile][i][half * 2],
                result[tile][i][half * 2 + 1]);
      }
    }
  };
  if (shares_with_keys == 1) {
    for_each([&](int head, int channel, float low, float high) {
      if (head >= of.rows) return;
      const float all = sum_of(head);
      const float factor = all == 0 || all != all ? 1.0F : 1.0F / all;
      *reinterpret_cast<__nv_bfloat162*>(a.result + (of.first_head + head) * kLatent + channel) =
          __floats2bfloat162_rn(low * factor, high * factor);
    });
    return;
  }
  using LatentShare = Share<kLatent, kHeads>;
  static_assert(sizeof(LatentShare) <= sizeof(shared.key));
  auto& mine = *reinterpret_cast<LatentShare*>(shared.key);
  for_each([&](int head, int channel, float low, float high) {
    *reinterpret_cast<float2*>(&mine.result[head][channel]) = make_float2(low, high);
  });
  if (warp == 0 && quad_lane == 0) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int head = tile * kRows + quad_row + half * 8;
        mine.maximum[head] = maximum[tile][half];
        mine.sum[head] = sum_of(head);
      }
    }
  }
  join_shares(a, mine, shares_with_keys, of.rows, of.group_row, a.result + of.first_head * kLatent);
}

template <int kTiles>
cudaError_t launch_paged_latents(const PagedArguments& arguments, cudaStream_t stream) {
  const auto& shape = arguments.shape;
  const int tiles = ceil_div(shape.heads, kTiles * kRows);
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(shape.sequences));
  const bool may_be_long = shape.max_blocks > kLeastBlocksOfShare;
  return launch_rows(paged_latents_kernel<kTiles>, sizeof(LatentShared<kTiles>),
                     may_be_long ? shares_of(tiles * shape.sequences) : 1, arguments, grid, stream,
                     kLatentThreads);
}

}  // namespace

cudaError_t paged_latents(const PagedArguments& arguments, cudaStream_t stream) {
  return arguments.shape.heads > kRows ? launch_paged_latents<2>(arguments, stream)
                                       : launch_paged_latents<1>(arguments, stream);
}

}  // namespace ferry::models::launch
