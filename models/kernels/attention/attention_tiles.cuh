// Tiles of keys and values in shared memory, of which attention's kernels are made.
#pragma once

#include "models/kernels/cuda/tensor_cores.cuh"

namespace ferry::models::launch {

constexpr int kRows = 16;    // of an m16n8k16 product
constexpr int kColumns = 8;  // of one
constexpr int kDepth = 16;   // of one
constexpr int kQuad = 4;     // lanes that hold a row's columns
constexpr int kChunk = 8;    // elements of 16 bytes
constexpr int kCacheBlock = 64;

// Rows of `kWidth` elements in shared memory whose chunks of 16 bytes change places, so that
// neighbouring rows' ones lie in other banks.
template <int kWidth>
struct Tile {
  __nv_bfloat16* data;
  __device__ __nv_bfloat16* chunk(int row, int index) const {
    return data + row * kWidth + ((index ^ (row & 7)) * kChunk);
  }
};

}  // namespace ferry::models::launch
