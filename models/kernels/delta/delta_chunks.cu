#include "models/kernels/attention/attention_tiles.cuh"
#include "models/kernels/delta/delta_launch.h"

namespace ferry::models::launch {
namespace {

using Bf16 = __nv_bfloat16;

constexpr int kDim = static_cast<int>(kDeltaDim);
constexpr int kTokens = 64;  // of a chunk
constexpr int kValues = 32;  // channels of values of a block
constexpr int kChunkWarps = 4;
constexpr int kChunkThreads = kChunkWarps * kLanes;
constexpr int kKeysOfChunkWarp = kDim / kChunkWarps;
constexpr int kKeyTiles = kKeysOfChunkWarp / kRows;
constexpr int kValueTiles = kValues / kColumns;

// Rows in shared memory, 16 bytes apart from a multiple of 128: neighbours lie in other banks.
template <int kWidth>
constexpr int kPadded = kWidth + kChunk;

struct ChunksShared {
  alignas(16) Bf16 b[kTokens * kPadded<kDim>];
  alignas(16) Bf16 c[kTokens * kPadded<kDim>];
  alignas(16) Bf16 state[kDim * kPadded<kValues>];
  alignas(16) Bf16 y[kTokens * kPadded<kValues>];
};

template <int kWidth>
__device__ Bf16* padded(Bf16* data, int row, int column) {
  return data + row * kPadded<kWidth> + column;
}

// Begins to load [kTokens, kDim] as one group.
__device__ void load_tokens(Bf16* to, const Bf16* from) {
  constexpr int kChunksOfRow = kDim / kChunk;
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < kTokens * kChunksOfRow; i += kChunkThreads)
    copy_async(padded<kDim>(to, i / kChunksOfRow, i % kChunksOfRow * kChunk), from + i * kChunk,
               true);
  commit_copies();
}

// Stores [rows, kValues] of shared memory in rows of `values` channels.
template <int kRowsToStore>
__device__ void store_rows(Bf16* to, Bf16* from, int values) {
  constexpr int kChunksOfRow = kValues / kChunk;
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < kRowsToStore * kChunksOfRow; i += kChunkThreads) {
    const int row = i / kChunksOfRow;
    const int column = i % kChunksOfRow * kChunk;
    *reinterpret_cast<uint4*>(to + static_cast<std::int64_t>(row) * values + column) =
        *reinterpret_cast<const uint4*>(padded<kValues>(from, row, column));
  }
}

__device__ float2 two_of(const Bf16* from) {
  const auto pair = *reinterpret_cast<const __nv_bfloat162*>(from);
  return {__low2float(pair), __high2float(pair)};
}

// A block has some channels of values of one head's state: in fp32 in registers, each warp some
// keys' rows, and rounded in shared memory, where products read it. Chunks follow one another; the
// next one's rows are on their way while this one's are multiplied.
__global__ void __launch_bounds__(kChunkThreads) walk_chunks(DeltaChunks a) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<ChunksShared*>(memory);
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / kLanes;
  const int lane = thread % kLanes;
  const int quad_row = lane / kQuad;
  const int quad_column = lane % kQuad * 2;
  const int first_value = static_cast<int>(blockIdx.x) * kValues;
  const std::int64_t head = blockIdx.y;
  const int begin = a.begins[blockIdx.z];
  const int count = a.begins[blockIdx.z + 1] - begin;
  const auto chunk_at = [&](int step) {
    return head * a.chunks + begin + (a.backwards ? count - 1 - step : step);
  };
  const auto* const b = static_cast<const Bf16*>(a.b);
  const auto* const c = static_cast<const Bf16*>(a.c);
  constexpr std::int64_t kOfChunk = kTokens * kDim;
  if (count > 0) {
    load_tokens(shared.b, b + chunk_at(0) * kOfChunk);
    load_tokens(shared.c, c + chunk_at(0) * kOfChunk);
  }

  // state[i][j][..]: rows quad_row and 8 below it of tile i, two columns of tile j.
  float state[kKeyTiles][kValueTiles][4] = {};
  const auto key_of = [&](int tile, int half) {
    return warp * kKeysOfChunkWarp + tile * kRows + half * (kRows / 2) + quad_row;
  };
  // Offset of two of the state's channels in [kDim, values].
  const auto place_of = [&](int tile, int half, int column) {
    return static_cast<std::int64_t>(key_of(tile, half)) * a.values + first_value +
           column * kColumns + quad_column;
  };
  const std::int64_t of_state = static_cast<std::int64_t>(kDim) * a.values;

  for (int step = 0; step < count; ++step) {
    const std::int64_t chunk = chunk_at(step);
    const bool goes_on = step + 1 < count;
#pragma unroll
    for (int tile = 0; tile < kKeyTiles; ++tile)
#pragma unroll
      for (int column = 0; column < kValueTiles; ++column)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          *reinterpret_cast<__nv_bfloat162*>(
              padded<kValues>(shared.state, key_of(tile, half), column * kColumns + quad_column)) =
              __floats2bfloat162_rn(state[tile][column][half * 2],
                                    state[tile][column][half * 2 + 1]);
    wait_for_all_but<1>();  // b is there
    __syncthreads();

    // Y = A + B S: each warp 16 tokens.
    float y[kValueTiles][4];
    const int token = warp * kRows + quad_row;
    const std::int64_t y_at = (chunk * kTokens + token) * a.values + first_value + quad_column;
#pragma unroll
    for (int column = 0; column < kValueTiles; ++column)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto read = two_of(static_cast<const Bf16*>(a.a) + y_at + column * kColumns +
                                 static_cast<std::int64_t>(half) * (kRows / 2) * a.values);
        y[column][half * 2] = read.x;
        y[column][half * 2 + 1] = read.y;
      }
#pragma unroll
    for (int depth = 0; depth < kDim / kDepth; ++depth) {
      Fragment rows;
      load_matrices(rows, padded<kDim>(shared.b, warp * kRows + lane % 16,
                                       depth * kDepth + lane / 16 * kChunk));
#pragma unroll
      for (int pair = 0; pair < kValueTiles; pair += 2) {
        Fragment of_state_tile;
        load_matrices_transposed(of_state_tile,
                                 padded<kValues>(shared.state, depth * kDepth + lane % 16,
                                                 pair * kColumns + lane / 16 * kColumns));
        multiply_add(y[pair], rows, of_state_tile[0], of_state_tile[1]);
        multiply_add(y[pair + 1], rows, of_state_tile[2], of_state_tile[3]);
      }
    }
#pragma unroll
    for (int column = 0; column < kValueTiles; ++column)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        *reinterpret_cast<__nv_bfloat162*>(padded<kValues>(shared.y, token + half * (kRows / 2),
                                                           column * kColumns + quad_column)) =
            __floats2bfloat162_rn(y[column][half * 2], y[column][half * 2 + 1]);
    wait_for_all_but<0>();  // c is there
    __syncthreads();        // and y; all have read b
    if (goes_on) load_tokens(shared.b, b + chunk_at(step + 1) * kOfChunk);
    store_rows<kTokens>(static_cast<Bf16*>(a.y) + chunk * kTokens * a.values + first_value,
                        shared.y, a.values);
    store_rows<kDim>(static_cast<Bf16*>(a.states) + chunk * of_state + first_value, shared.state,
                     a.values);

    // S = decay S + C^T Y + R.
    const float decay = a.decay[chunk];
#pragma unroll
    for (int i = 0; i < kKeyTiles * kValueTiles * 2; ++i) {
      const int tile = i / (kValueTiles * 2);
      const int column = i / 2 % kValueTiles;
      const int half = i % 2;
      float2 more{};
      if (a.r != nullptr)
        more =
            two_of(static_cast<const Bf16*>(a.r) + chunk * of_state + place_of(tile, half, column));
      auto* const pair = state[tile][column] + half * 2;
      pair[0] = __fmaf_rn(pair[0], decay, more.x);
      pair[1] = __fmaf_rn(pair[1], decay, more.y);
    }
#pragma unroll
    for (int depth = 0; depth < kTokens / kDepth; ++depth) {
      Fragment of_y[kValueTiles / 2];
#pragma unroll
      for (int pair = 0; pair < kValueTiles / 2; ++pair)
        load_matrices_transposed(of_y[pair], padded<kValues>(shared.y, depth * kDepth + lane % 16,
                                                             pair * kRows + lane / 16 * kColumns));
#pragma unroll
      for (int tile = 0; tile < kKeyTiles; ++tile) {
        Fragment keys;  // of C, transposed
        load_matrices_transposed(
            keys, padded<kDim>(shared.c, depth * kDepth + lane / 16 * kColumns + lane % 8,
                               warp * kKeysOfChunkWarp + tile * kRows + lane / 8 % 2 * kColumns));
#pragma unroll
        for (int pair = 0; pair < kValueTiles / 2; ++pair) {
          multiply_add(state[tile][pair * 2], keys, of_y[pair][0], of_y[pair][1]);
          multiply_add(state[tile][pair * 2 + 1], keys, of_y[pair][2], of_y[pair][3]);
        }
      }
    }
    __syncthreads();  // all have read c, y and the state
    if (goes_on) load_tokens(shared.c, c + chunk_at(step + 1) * kOfChunk);
  }
}

}  // namespace

cudaError_t delta_chunks(const DeltaChunks& chunks, cudaStream_t stream) {
  if (chunks.values % kValues != 0) return cudaErrorInvalidValue;
  constexpr int kBytes = sizeof(ChunksShared);
  const auto error =
      cudaFuncSetAttribute(walk_chunks, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  const dim3 blocks(static_cast<unsigned>(chunks.values / kValues),
                    static_cast<unsigned>(chunks.heads), static_cast<unsigned>(chunks.sequences));
  walk_chunks<<<blocks, kChunkThreads, kBytes, stream>>>(chunks);
  return cudaGetLastError();
}

}  // namespace ferry::models::launch
