// Tiles of keys and values in shared memory, and the products of tensor cores that attention's
// kernels are made of: m16n8k16 of bf16, added up in fp32.
#pragma once

#include "models/kernels/cuda/cuda_element.cuh"

namespace ferry::models::launch {

constexpr int kRows = 16;    // of an m16n8k16 product
constexpr int kColumns = 8;  // of one
constexpr int kDepth = 16;   // of one
constexpr int kQuad = 4;     // lanes that hold a row's columns
constexpr int kChunk = 8;    // elements of 16 bytes
constexpr int kCacheBlock = 64;

// 16 bytes that come later, or zeros.
__device__ inline void copy_async(void* to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(exists ? 16 : 0));
}
__device__ inline void commit_copies() {
  asm volatile("cp.async.commit_group;");
}
template <int N>
__device__ void wait_for_all_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N));
}

using Fragment = std::uint32_t[4];

__device__ inline void load_matrices(Fragment& to, const void* from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(from)));
}
__device__ inline void load_matrices_transposed(Fragment& to, const void* from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(from)));
}

__device__ inline void multiply_add(float (&c)[4],
                                    const Fragment& a,
                                    std::uint32_t b0,
                                    std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Rows of `kWidth` elements in shared memory whose chunks of 16 bytes change places, so that
// neighbouring rows' ones lie in other banks.
template <int kWidth>
struct Tile {
  __nv_bfloat16* data;
  __device__ __nv_bfloat16* chunk(int row, int index) const {
    return data + row * kWidth + ((index ^ (row & 7)) * kChunk);
  }
};

// The same along 8 only: m16n8k8.
__device__ inline void multiply_add_half(float (&c)[4],
                                         std::uint32_t a0,
                                         std::uint32_t a1,
                                         std::uint32_t b) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b));
}

}  // namespace ferry::models::launch
