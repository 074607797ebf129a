#include <cmath>

#include "models/kernels/attention/attention_tiles.cuh"
#include "models/kernels/cuda/cuda_element.cuh"

// Replays, row by row, "eager" attention of GPT-OSS in transformers (modeling_gpt_oss.py,
// eager_attention_forward) with the kernels that ATen takes for it on Hopper: scores rounded to
// bf16 before and after they are scaled, the largest one or the sink subtracted and rounded, the
// softmax of at most 1024 elements (ATen/native/cuda/PersistentSoftmax.cuh: lane l of a warp adds
// up the elements l, l + 32, .. in order, then the lanes add up by halves) with the sink behind a
// number of keys that is a multiple of 32, weights rounded, and products with values in one chain
// along the keys, 8 at a time. Hidden keys add zeros, so that a row depends on its own keys alone.
//
// Keys pass three times: for the largest score, for the sum, and for weights and values. Scores of
// up to 16 rows and so many keys that they find room where values would lie are kept instead: keys
// pass once, and values then take the place of keys.
namespace ferry::models::launch {
namespace {

using Bf16 = __nv_bfloat16;

constexpr int kEagerWarps = 4;
constexpr int kEagerThreads = kEagerWarps * kLanes;
constexpr int kEagerKeys = 64;  // of a tile
constexpr int kEagerStages = 3;
constexpr int kPasses = 3;

template <int kDim, int kRowsOfTile>
struct EagerShared {
  alignas(16) Bf16 key[kEagerStages][kEagerKeys * kDim];
  alignas(16) Bf16 value[kEagerStages][kEagerKeys * kDim];
  alignas(16) Bf16 weights[kRowsOfTile * kEagerKeys];
  float exact[kRowsOfTile][kEagerKeys + kQuad];
  float maximum[kEagerWarps][kRowsOfTile];
  float sum[kRowsOfTile];
};

// The rows and keys of a thread block: rows are the heads of a group, token after token.
struct EagerTile {
  std::int64_t first_query = 0;  // of the sequence
  std::int64_t first_slot = 0;   // of its keys, where they lie one behind another
  const std::int32_t* table = nullptr;
  int heads_of_group = 0;
  int group = 0;
  int first_row = 0;  // of the sequence and group
  int rows = 0;
  int first_position = 0;  // of the sequence's first query
  int first_key = 0;       // that a row of the tile sees
  int last_key = 0;

  __device__ int head(int row) const {
    return group * heads_of_group + (first_row + row) % heads_of_group;
  }
  __device__ std::int64_t query(int row) const {
    return first_query + (first_row + row) / heads_of_group;
  }
  __device__ int position(int row) const {
    return first_position + (first_row + row) / heads_of_group;
  }
};

// Keys `first` to `last` that a row sees, the largest of its scores and the sink.
struct EagerRow {
  int first = 0;
  int last = -1;
  float maximum = 0;
  __device__ bool sees(int position) const { return position >= first && position <= last; }
  // The exponential of the score of a position, to be divided by the sum.
  __device__ float exponential(float score, int position) const {
    return sees(position) ? expf(rounded<Bf16>(__fsub_rn(score, maximum))) : 0.0F;
  }
};

__device__ EagerRow row_of(const EagerTile& tile, int row, int window) {
  EagerRow found;
  if (row >= tile.rows) return found;
  found.last = tile.position(row);
  if (window > 0) found.first = found.last - window + 1;
  return found;
}

// Scaled scores of a tile of keys and up to 16 rows, as the lanes of the warps have them: of each
// half of the rows two neighbours of each of two tiles of keys.
struct KeptScores {
  __nv_bfloat162* scores;
  int blocks;

  __device__ __nv_bfloat162* of_thread(int half, int block, int thread) const {
    return scores + ((half * blocks + block) * kEagerThreads + thread) * 2;
  }
  __device__ float at(int row, int block, int key) const {
    const int column = key % kColumns;
    const int thread = key / (2 * kColumns) * kLanes + row % 8 * kQuad + column / 2;
    const auto pair = of_thread(row / 8, block, thread)[key / kColumns % 2];
    return widen(column % 2 == 0 ? pair.x : pair.y);
  }
};

template <int kDim>
__device__ void load_tile(
    const EagerAttention& a, const EagerTile& tile, const void* from, Bf16* to, int block) {
  constexpr int kChunks = kDim / kChunk;
  const Tile<kDim> rows{to};
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < kEagerKeys * kChunks; i += kEagerThreads) {
    const int row = i / kChunks;
    const int chunk = i % kChunks;
    const int position = block * kEagerKeys + row;
    const bool exists = position >= tile.first_key && position <= tile.last_key;
    std::int64_t at = 0;
    if (exists) {
      const std::int64_t slot =
          tile.table == nullptr
              ? tile.first_slot + position
              : static_cast<std::int64_t>(tile.table[position / kCacheBlock]) * kCacheBlock +
                    position % kCacheBlock;
      at = (slot * a.shape.groups + tile.group) * kDim + chunk * kChunk;
    }
    copy_async(rows.chunk(row, chunk), static_cast<const Bf16*>(from) + at, exists);
  }
}

// kRowWarps of the warps have 16 rows each; the others share out keys, then channels, of the same
// rows.
template <int kDim, int kRowWarps>
__global__ __launch_bounds__(kEagerThreads) void eager_attention_kernel(EagerAttention a) {
  constexpr int kRowsOfTile = kRows * kRowWarps;
  constexpr int kSharers = kEagerWarps / kRowWarps;
  constexpr int kKeysOfWarp = kEagerKeys / kSharers;
  constexpr int kScoreTiles = kKeysOfWarp / kColumns;
  constexpr int kChannelsOfWarp = kDim / kSharers;
  constexpr int kResultTiles = kChannelsOfWarp / kColumns;
  constexpr int kSteps = kDim / kDepth;
  constexpr int kThreadsOfRow = kEagerThreads / kRowsOfTile;
  constexpr int kChains = kLanes / kThreadsOfRow;
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<EagerShared<kDim, kRowsOfTile>*>(memory);

  release_dependents();
  wait_for_inputs();
  const auto& shape = a.shape;
  const int sequence = static_cast<int>(blockIdx.y);
  const int thread = static_cast<int>(threadIdx.x);
  const int tiles = static_cast<int>(gridDim.x) / shape.groups;
  EagerTile tile{.first_query = sequence,
                 .heads_of_group = shape.heads / shape.groups,
                 .group = static_cast<int>(blockIdx.x) / tiles,
                 .first_row = static_cast<int>(blockIdx.x) % tiles * kRowsOfTile};
  int queries = 1;
  if (a.query_begin != nullptr) {
    tile.first_query = a.query_begin[sequence];
    queries = a.query_begin[sequence + 1] - a.query_begin[sequence];
  }
  int length = 0;
  if (a.key_begin != nullptr) {
    tile.first_slot = a.key_begin[sequence];
    length = a.key_begin[sequence + 1] - a.key_begin[sequence];
  } else {
    tile.table = a.block_tables + static_cast<std::int64_t>(sequence) * shape.max_blocks;
    length = a.lengths[sequence];
  }
  tile.rows = min(kRowsOfTile, queries * tile.heads_of_group - tile.first_row);
  if (tile.rows <= 0) return;
  auto* const result = static_cast<Bf16*>(a.result);
  const auto begin_of = [&](int row) {  // in queries and results
    return (tile.query(row) * shape.heads + tile.head(row)) * kDim;
  };
  if (length == 0) {
    for (int i = thread; i < tile.rows * kDim; i += kEagerThreads)
      result[begin_of(i / kDim) + i % kDim] = __float2bfloat16_rn(0);
    return;
  }
  tile.first_position = length - queries;
  tile.last_key = tile.position(tile.rows - 1);
  if (shape.window > 0) tile.first_key = max(0, tile.position(0) - shape.window + 1);
  const int first_block = tile.first_key / kEagerKeys;
  const int blocks = tile.last_key / kEagerKeys - first_block + 1;
  // Keeping scores leaves out the pass for the sum.
  const int halves = tile.rows > kRows / 2 ? 2 : 1;
  const auto kept_bytes =
      static_cast<std::size_t>(halves * blocks * kEagerThreads) * 2 * sizeof(__nv_bfloat162);
  const bool keeps = kRowWarps == 1 && kept_bytes <= sizeof shared.value;
  const KeptScores kept{reinterpret_cast<__nv_bfloat162*>(shared.value), blocks};
  const int steps = (keeps ? 2 : kPasses) * blocks;
  const auto pass_of = [&](int step) {
    return keeps && step >= blocks ? kPasses - 1 : step / blocks;
  };
  const auto values_of = [&](int stage) { return (keeps ? shared.key : shared.value)[stage]; };
  // The copies of each step form one group; steps behind the last get an empty group.
  const auto load = [&](int step) {
    const int stage = step % kEagerStages;
    if (step < steps) {
      const int block = first_block + step % blocks;
      const bool last_pass = pass_of(step) == kPasses - 1;
      if (!keeps || !last_pass) load_tile<kDim>(a, tile, a.key, shared.key[stage], block);
      if (last_pass) load_tile<kDim>(a, tile, a.value, values_of(stage), block);
    }
    commit_copies();
  };
  for (int step = 0; step < kEagerStages - 1; ++step) load(step);

  const int warp = thread / kLanes;
  const int lane = thread % kLanes;
  const int warp_row = warp / kSharers * kRows;
  const int sharer = warp % kSharers;
  const int quad_row = warp_row + lane / kQuad;  // the lane's rows: this one, and that 8 behind
  const int quad_lane = lane % kQuad;
  const auto* const sinks = static_cast<const Bf16*>(a.sinks);
  const auto* const all_queries = static_cast<const Bf16*>(a.query);
  const auto sink_of = [&](int row) { return row < tile.rows ? widen(sinks[tile.head(row)]) : 0; };
  EagerRow of_lane[2];
  Fragment query[kSteps] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = quad_row + half * (kRows / 2);
    of_lane[half] = row_of(tile, row, shape.window);
    of_lane[half].maximum = sink_of(row);
    if (row >= tile.rows) continue;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const int column = step * kDepth + quad_lane * 2 + part * (kDepth / 2);
        query[step][half + 2 * part] =
            *reinterpret_cast<const std::uint32_t*>(all_queries + begin_of(row) + column);
      }
    }
  }
  const int summed_row = thread / kThreadsOfRow;   // of which this thread has chains, every
  const int first_chain = thread % kThreadsOfRow;  // kThreadsOfRow-th one
  float chains[kChains] = {};
  float sums[2] = {1, 1};
  float attended[kResultTiles][4] = {};

  // The largest of a row's scores, which the sharers have left, and of its sink.
  const auto maximum_of = [&](int row) {
    float maximum = sink_of(row);
    for (int i = 0; i < kSharers; ++i) maximum = fmaxf(maximum, shared.maximum[i][row]);
    return maximum;
  };
  // Adds up the chains of each row, which lie in shared.exact.
  const auto add_chains = [&] {
    __syncthreads();
    if (thread < kRowsOfTile) {
      auto* const lanes = shared.exact[thread];
      const float maximum = maximum_of(thread);
      lanes[0] = __fadd_rn(lanes[0], expf(rounded<Bf16>(__fsub_rn(sink_of(thread), maximum))));
      for (int distance = kLanes / 2; distance > 0; distance /= 2)
        for (int i = 0; i < distance; ++i) lanes[i] = __fadd_rn(lanes[i], lanes[i + distance]);
      shared.sum[thread] = lanes[0];
      if (a.log_sum != nullptr && thread < tile.rows)
        a.log_sum[tile.head(thread) * a.queries + tile.query(thread)] = maximum + logf(lanes[0]);
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) sums[half] = shared.sum[quad_row + half * (kRows / 2)];
  };

  for (int step = 0; step < steps; ++step) {
    const int stage = step % kEagerStages;
    const int pass = pass_of(step);
    const int block = step % blocks;
    const int first = (first_block + block) * kEagerKeys + sharer * kKeysOfWarp;
    wait_for_all_but<kEagerStages - 2>();
    __syncthreads();  // this tile is there, and all have read what the last one was
    load(step + kEagerStages - 1);

    float scores[kScoreTiles][4] = {};  // of the lane's rows, scaled
    if (keeps && pass > 0) {
      for (int half = 0; half < halves; ++half) {
        const auto* const mine = kept.of_thread(half, block, thread);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          scores[i][2 * half] = widen(mine[i].x);
          scores[i][2 * half + 1] = widen(mine[i].y);
        }
      }
    } else {
      const Tile<kDim> keys{shared.key[stage]};
#pragma unroll
      for (int depth = 0; depth < kSteps; ++depth) {
#pragma unroll
        for (int pair = 0; pair < kScoreTiles; pair += 2) {
          Fragment b;  // of two tiles: channels below and above 8 of each
          const int row = sharer * kKeysOfWarp + pair * kColumns + lane % 8 + lane / 16 * 8;
          load_matrices(b, keys.chunk(row, depth * 2 + lane / 8 % 2));
          multiply_add(scores[pair], query[depth], b[0], b[1]);
          multiply_add(scores[pair + 1], query[depth], b[2], b[3]);
        }
      }
#pragma unroll
      for (auto& of_tile : scores)
#pragma unroll
        for (auto& score : of_tile)
          score = rounded<Bf16>(__fmul_rn(rounded<Bf16>(score), shape.scale));
    }
    // Calls `body(score, half, column)` for each.
    const auto for_each_score = [&](const auto& body) {
#pragma unroll
      for (int i = 0; i < kScoreTiles; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) body(scores[i][j], j / 2, i * kColumns + quad_lane * 2 + j % 2);
      }
    };
    if (pass == 0) {
      for_each_score([&](float score, int half, int column) {
        auto& row = of_lane[half];
        if (row.sees(first + column)) row.maximum = fmaxf(row.maximum, score);
      });
      if (keeps) {
        for (int half = 0; half < halves; ++half) {
          auto* const mine = kept.of_thread(half, block, thread);
#pragma unroll
          for (int i = 0; i < 2; ++i)
            mine[i] = __floats2bfloat162_rn(scores[i][2 * half], scores[i][2 * half + 1]);
        }
      }
      if (step + 1 < blocks) continue;
        // The largest scores of the sharers' keys.
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        auto& mine = of_lane[half].maximum;
        for (int distance = kQuad / 2; distance > 0; distance /= 2)
          mine = fmaxf(mine, __shfl_xor_sync(0xffffffffu, mine, distance));
        if (quad_lane == 0) shared.maximum[sharer][quad_row + half * (kRows / 2)] = mine;
      }
      __syncthreads();
#pragma unroll
      for (int half = 0; half < 2; ++half)
        of_lane[half].maximum = maximum_of(quad_row + half * (kRows / 2));
      if (!keeps) continue;
      // The threads of a row share out its chains.
      const int of_row = kEagerThreads / (halves * (kRows / 2));
      const int row = thread / of_row;
      auto mine = row_of(tile, row, shape.window);
      mine.maximum = maximum_of(row);
      for (int chain = thread % of_row; chain < kLanes; chain += of_row) {
        float sum = 0;
        for (int at = 0; at < blocks; ++at) {
#pragma unroll
          for (int key = 0; key < kEagerKeys; key += kLanes)
            sum = __fadd_rn(sum, mine.exponential(kept.at(row, at, key + chain),
                                                  (first_block + at) * kEagerKeys + key + chain));
        }
        shared.exact[row][chain] = sum;
      }
      add_chains();
      continue;
    }
    const auto exponential = [&](float score, int half, int column) {
      return of_lane[half].exponential(score, first + column);
    };
    if (pass == 1) {
      for_each_score([&](float score, int half, int column) {
        shared.exact[quad_row + half * (kRows / 2)][sharer * kKeysOfWarp + column] =
            exponential(score, half, column);
      });
      __syncthreads();
#pragma unroll
      for (int lanes = 0; lanes < kEagerKeys; lanes += kLanes) {
#pragma unroll
        for (int i = 0; i < kChains; ++i)
          chains[i] = __fadd_rn(chains[i],
                                shared.exact[summed_row][lanes + i * kThreadsOfRow + first_chain]);
      }
      if (step + 1 < 2 * blocks) continue;
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kChains; ++i)
        shared.exact[summed_row][i * kThreadsOfRow + first_chain] = chains[i];
      add_chains();
      continue;
    }
    const Tile<kEagerKeys> weights{shared.weights};
    for_each_score([&](float score, int half, int column) {
      const int key = sharer * kKeysOfWarp + column;
      weights.chunk(quad_row + half * (kRows / 2), key / kChunk)[key % kChunk] =
          narrow<Bf16>(__fdiv_rn(exponential(score, half, column), sums[half]));
    });
    __syncthreads();
    const Tile<kDim> values{values_of(stage)};
#pragma unroll
    for (int depth = 0; depth < kEagerKeys / kDepth; ++depth) {
      Fragment of_rows;
      load_matrices(of_rows, weights.chunk(warp_row + lane % 16, depth * 2 + lane / 16));
#pragma unroll
      for (int pair = 0; pair < kResultTiles; pair += 2) {
        Fragment b;
        const int channel = sharer * kChannelsOfWarp + pair * kColumns + lane / 16 * kColumns;
        load_matrices_transposed(b, values.chunk(depth * kDepth + lane % 16, channel / kChunk));
        multiply_add_half(attended[pair], of_rows[0], of_rows[1], b[0]);
        multiply_add_half(attended[pair], of_rows[2], of_rows[3], b[1]);
        multiply_add_half(attended[pair + 1], of_rows[0], of_rows[1], b[2]);
        multiply_add_half(attended[pair + 1], of_rows[2], of_rows[3], b[3]);
      }
    }
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = quad_row + half * (kRows / 2);
    if (row >= tile.rows) continue;
#pragma unroll
    for (int i = 0; i < kResultTiles; ++i) {
      const int channel = sharer * kChannelsOfWarp + i * kColumns + quad_lane * 2;
      *reinterpret_cast<__nv_bfloat162*>(result + begin_of(row) + channel) =
          __floats2bfloat162_rn(attended[i][half * 2], attended[i][half * 2 + 1]);
    }
  }
}

template <int kDim, int kRowWarps>
cudaError_t launch_eager(const EagerAttention& arguments, cudaStream_t stream) {
  constexpr int kBytes = sizeof(EagerShared<kDim, kRows * kRowWarps>);
  const auto& shape = arguments.shape;
  const auto kernel = eager_attention_kernel<kDim, kRowWarps>;
  const int rows = arguments.longest_query * (shape.heads / shape.groups);
  const int tiles = (rows + kRows * kRowWarps - 1) / (kRows * kRowWarps);
  const dim3 grid(static_cast<unsigned>(shape.groups * tiles),
                  static_cast<unsigned>(shape.sequences));
  return launch_dependent(kernel, grid, kEagerThreads, kBytes, stream, arguments);
}

template <int kDim>
cudaError_t launch_eager(const EagerAttention& arguments, cudaStream_t stream) {
  return arguments.longest_query * (arguments.shape.heads / arguments.shape.groups) <= kRows
             ? launch_eager<kDim, 1>(arguments, stream)
             : launch_eager<kDim, kEagerWarps>(arguments, stream);
}

}  // namespace

cudaError_t eager_attention(const EagerAttention& arguments, cudaStream_t stream) {
  if (arguments.shape.sequences == 0) return cudaSuccess;
  return arguments.shape.dim == 64 ? launch_eager<64>(arguments, stream)
                                   : launch_eager<128>(arguments, stream);
}

}  // namespace ferry::models::launch
