// attend() with the same bits by the blocks of a cluster, for a long sequence: what does not depend
// on the order of the key blocks is shared out by keys, the products with the values, which are
// added up in that order, by channels.
#pragma once

#include "models/kernels/attention/paged_rows.cuh"

namespace ferry::models::launch {

constexpr int kOwnBlocks = 2;  // key blocks of a thread block in a round

template <int kDim, int kKeys, int kRanks>
struct OrderedShared {
  static constexpr int kRound = kRanks * kOwnBlocks;  // key blocks of a round, the last first
  static constexpr int kSlice = kDim / kRanks;        // channels of a thread block
  static constexpr int kRowsOfRank = kRows / kRanks;  // rows whose weights it sums
  alignas(16) __nv_bfloat16 key[kOwnBlocks][kKeys * kDim];
  alignas(16) __nv_bfloat16 value[kRound][kKeys * kSlice];
  alignas(16) __nv_bfloat16 weights[kRound][kRows * kKeys];  // of all thread blocks
  alignas(16) float exact[kRound][kRowsOfRank][kKeys];       // the same, before they are rounded
  // Read by the other thread blocks: those of even rounds and of odd ones.
  alignas(16) __nv_bfloat16 own_weights[2][kOwnBlocks][kRows * kKeys];
  alignas(16) float own_exact[2][kOwnBlocks][kRows][kKeys];
  float own_maximum[2][kOwnBlocks][kRows];
  float own_inverse_sum[kRowsOfRank];
  float maximum_of_warp[kOwnBlocks][kWarps][kRows];
  float maximum[kRound][kRows];  // of each block, then of it and all before
  float growth[kRound][kRows];
  float inverse_sum[kRows];
};

// The cluster has kRanks thread blocks, all of which call this.
template <int kDim, int kKeys, int kRanks>
__device__ void attend_ordered(const PagedArguments& a,
                               const RowTile& of,
                               OrderedShared<kDim, kKeys, kRanks>& shared) {
  using Memory = OrderedShared<kDim, kKeys, kRanks>;
  constexpr int kRound = Memory::kRound;
  constexpr int kSlice = Memory::kSlice;
  constexpr int kRowsOfRank = Memory::kRowsOfRank;
  constexpr int kKeysOfWarp = kKeys / kWarps;
  constexpr int kScoreTiles = kKeysOfWarp / kColumns;
  constexpr int kSteps = kDim / kDepth;
  constexpr int kPairs = kSlice / kDepth;  // of eight channels each
  constexpr int kPairsOfWarp = kPairs > kWarps ? kPairs / kWarps : 1;
  const auto cluster = cooperative_groups::this_cluster();
  const int rank = static_cast<int>(cluster.block_rank());
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / kLanes;
  const int lane = thread % kLanes;
  const int quad_row = lane / kQuad;
  const int quad_lane = lane % kQuad;
  const auto* const table = table_of(a, of);
  const int first_key = first_key_of(a, of);
  const int last_block = (of.length - 1) / kKeys;
  const int num_blocks = last_block - first_key / kKeys + 1;
  const int rounds = ceil_div(num_blocks, kRound);

  const auto load_keys = [&](int round) {
    constexpr int kChunks = kDim / kChunk;
    for (int own = 0; own < kOwnBlocks; ++own) {
      const int number = round * kRound + rank * kOwnBlocks + own;
      if (number >= num_blocks) break;
      const Tile<kDim> keys{shared.key[own]};
#pragma unroll 8
      for (int i = thread; i < kKeys * kChunks; i += kThreads) {
        const int row = i / kChunks;
        const int chunk = i % kChunks;
        const int position = (last_block - number) * kKeys + row;
        const bool exists = position < of.length;
        const std::int64_t at =
            exists ? place_of(a, table, position, of.group) * kDim + chunk * kChunk : 0;
        copy_async(keys.chunk(row, chunk), a.key + at, exists);
      }
    }
    commit_copies();
  };
  const auto load_values = [&](int round) {
    constexpr int kChunks = kSlice / kChunk;
    const int blocks = min(kRound, num_blocks - round * kRound);
#pragma unroll 8
    for (int i = thread; i < blocks * kKeys * kChunks; i += kThreads) {
      const int row = i / kChunks;
      const int chunk = i % kChunks;
      const int number = round * kRound + row / kKeys;
      const int position = (last_block - number) * kKeys + row % kKeys;
      const bool exists = position < of.length;
      const std::int64_t at =
          exists ? place_of(a, table, position, of.group) * kDim + rank * kSlice + chunk * kChunk
                 : 0;
      copy_async(shared.value[0] + row * kSlice + chunk * kChunk, a.value + at, exists);
    }
    commit_copies();
  };
  load_keys(0);
  load_values(0);
  Fragment query[kSteps];
  load_query<kDim>(query, a, of);

  float result[kPairsOfWarp][2][4] = {};
  float before = -INFINITY;  // thread t < 16: the maximum of row t so far
  // Chains of sums, of this rank's rows: by the last warp, which multiplies least.
  const bool sums = warp == kWarps - 1 && lane < kRowsOfRank * kQuad;
  const int summed_row = lane / kQuad;
  float sum = 0;

  for (int round = 0; round < rounds; ++round) {
    const int parity = round % 2;
    const int blocks = min(kRound, num_blocks - round * kRound);
    const int own_blocks = min(kOwnBlocks, blocks - rank * kOwnBlocks);  // or fewer than one
    wait_for_all_but<1>();
    __syncthreads();  // the keys are there

    float scores[kOwnBlocks][kScoreTiles][4] = {};
#pragma unroll
    for (int own = 0; own < kOwnBlocks; ++own) {
      if (own >= own_blocks) break;
      const Tile<kDim> keys{shared.key[own]};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int pair = 0; pair < kScoreTiles; pair += 2) {
          Fragment b;
          const int row = warp * kKeysOfWarp + pair * kColumns + lane % 8 + lane / 16 * 8;
          load_matrices(b, keys.chunk(row, step * 2 + lane / 8 % 2));
          multiply_add(scores[own][pair], query[step], b[0], b[1]);
          multiply_add(scores[own][pair + 1], query[step], b[2], b[3]);
        }
      }
      const int block = last_block - (round * kRound + rank * kOwnBlocks + own);
      keep_maxima(scores[own], block * kKeys + warp * kKeysOfWarp, first_key, of.length,
                  shared.maximum_of_warp[own][warp]);
    }
    __syncthreads();  // all have read the keys
    if (round + 1 < rounds)
      load_keys(round + 1);
    else
      commit_copies();
    if (thread < kOwnBlocks * kRows && thread / kRows < own_blocks) {
      float maximum = -INFINITY;
      for (int i = 0; i < kWarps; ++i)
        maximum = fmaxf(maximum, shared.maximum_of_warp[thread / kRows][i][thread % kRows]);
      shared.own_maximum[parity][thread / kRows][thread % kRows] = maximum;
    }
    cluster.sync();

    for (int i = thread; i < blocks * kRows; i += kThreads) {
      const int number = i / kRows;
      const auto* const there =
          cluster.map_shared_rank(&shared.own_maximum[parity][0][0], number / kOwnBlocks);
      shared.maximum[number][i % kRows] = there[number % kOwnBlocks * kRows + i % kRows];
    }
    __syncthreads();
    if (thread < kRows) {
      for (int number = 0; number < blocks; ++number) {
        const float now = fmaxf(before, shared.maximum[number][thread]);
        shared.growth[number][thread] = exp2f(__fmul_rn(__fsub_rn(before, now), a.scale_log2));
        shared.maximum[number][thread] = now;
        before = now;
      }
    }
    __syncthreads();

#pragma unroll
    for (int own = 0; own < kOwnBlocks; ++own) {
      if (own >= own_blocks) break;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = quad_row + half * 8;
        const float shift = __fmul_rn(shared.maximum[rank * kOwnBlocks + own][row], a.scale_log2);
#pragma unroll
        for (int tile = 0; tile < kScoreTiles; ++tile) {
          const int column = warp * kKeysOfWarp + tile * kColumns + quad_lane * 2;
          const auto weight = [&](float score) {
            return exp2f(__fsub_rn(__fmul_rn(score, a.scale_log2), shift));
          };
          const float low = weight(scores[own][tile][half * 2]);
          const float high = weight(scores[own][tile][half * 2 + 1]);
          *reinterpret_cast<float2*>(&shared.own_exact[parity][own][row][column]) =
              make_float2(low, high);
          const Tile<kKeys> weights{shared.own_weights[parity][own]};
          auto* const to = weights.chunk(row, column / kChunk) + column % kChunk;
          *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(low, high);
        }
      }
    }
    cluster.sync();

    // Weights that the others have computed, 16 bytes at once.
    constexpr int kWeightUnits = kRows * kKeys * 2 / 16;
    constexpr int kExactUnits = kRowsOfRank * kKeys * 4 / 16;
#pragma unroll 8
    for (int i = thread; i < blocks * kWeightUnits; i += kThreads) {
      const int number = i / kWeightUnits;
      const auto* const there =
          cluster.map_shared_rank(shared.own_weights[parity][0], number / kOwnBlocks);
      reinterpret_cast<uint4*>(shared.weights[0])[i] = reinterpret_cast<const uint4*>(
          there)[number % kOwnBlocks * kWeightUnits + i % kWeightUnits];
    }
#pragma unroll 4
    for (int i = thread; i < blocks * kExactUnits; i += kThreads) {
      const int number = i / kExactUnits;
      const auto* const there =
          cluster.map_shared_rank(&shared.own_exact[parity][0][0][0], number / kOwnBlocks);
      reinterpret_cast<uint4*>(&shared.exact[0][0][0])[i] = reinterpret_cast<const uint4*>(
          there + (number % kOwnBlocks * kRows + rank * kRowsOfRank) * kKeys)[i % kExactUnits];
    }
    wait_for_all_but<1>();
    __syncthreads();  // the values are there, too

#pragma unroll
    for (int mine = 0; mine < kPairsOfWarp; ++mine) {
      const int pair = mine * kWarps + warp;
      if (pair >= kPairs) break;
      for (int number = 0; number < blocks; ++number) {
        const Tile<kKeys> weights{shared.weights[number]};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float growth = shared.growth[number][quad_row + half * 8];
#pragma unroll
          for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
            for (int i = 0; i < 2; ++i)
              result[mine][tile][half * 2 + i] =
                  __fmul_rn(result[mine][tile][half * 2 + i], growth);
          }
        }
#pragma unroll
        for (int step = 0; step < kKeys / kDepth; ++step) {
          Fragment of_rows;
          load_matrices(of_rows, weights.chunk(lane % 16, step * 2 + lane / 16));
          Fragment b;
          load_matrices_transposed(b, shared.value[number] + (step * kDepth + lane % 16) * kSlice +
                                          pair * kDepth + lane / 16 * kColumns);
          multiply_add(result[mine][0], of_rows, b[0], b[1]);
          multiply_add(result[mine][1], of_rows, b[2], b[3]);
        }
      }
    }
    if (sums) {
      for (int number = 0; number < blocks; ++number) {
        const float* const of_row = shared.exact[number][summed_row] + lane % kQuad * 2;
        const float growth = shared.growth[number][rank * kRowsOfRank + summed_row];
        sum = __fmaf_rn(sum, growth, of_row[0]);
        sum = __fadd_rn(sum, of_row[1]);
#pragma unroll
        for (int tile = 1; tile < kKeys / kColumns; ++tile) {
          sum = __fadd_rn(sum, of_row[tile * kColumns]);
          sum = __fadd_rn(sum, of_row[tile * kColumns + 1]);
        }
      }
    }
    __syncthreads();  // all have read the values
    if (round + 1 < rounds)
      load_values(round + 1);
    else
      commit_copies();
  }

  if (warp == kWarps - 1) {
    for (int distance = kQuad / 2; distance > 0; distance /= 2)
      sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, distance));
    if (sums && lane % kQuad == 0)
      shared.own_inverse_sum[summed_row] = sum == 0 || sum != sum ? 1.0F : __fdiv_rn(1.0F, sum);
  }
  cluster.sync();
  if (thread < kRows)
    shared.inverse_sum[thread] =
        cluster.map_shared_rank(shared.own_inverse_sum, thread / kRowsOfRank)[thread % kRowsOfRank];
  cluster.sync();  // until here others read
#pragma unroll
  for (int mine = 0; mine < kPairsOfWarp; ++mine) {
    const int pair = mine * kWarps + warp;
    if (pair >= kPairs) break;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = quad_row + half * 8;
        if (row >= of.rows) continue;
        const int channel = rank * kSlice + pair * kDepth + tile * kColumns + quad_lane * 2;
        const float factor = shared.inverse_sum[row];
        *reinterpret_cast<__nv_bfloat162*>(a.result + (of.first_head + row) * kDim + channel) =
            __floats2bfloat162_rn(__fmul_rn(result[mine][tile][half * 2], factor),
                                  __fmul_rn(result[mine][tile][half * 2 + 1], factor));
      }
    }
  }
}

}  // namespace ferry::models::launch
