// Instructions of a warp's products, m16n8k16 of bf16 added up in fp32, and of copies into shared
// memory beside them.
#pragma once

#include "models/kernels/cuda/cuda_element.cuh"

namespace ferry::models::launch {

// 16 bytes that come later, or zeros. Copies of a thread between two calls of commit_copies() form
// a group.
__device__ inline void copy_async(void* to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(exists ? 16 : 0)
               : "memory");
}
// The same to an address in shared memory, of lines that are read whole.
__device__ inline void copy_async(std::uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from)
               : "memory");
}
__device__ inline void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits for all of this thread's groups but the last N.
template <int N>
__device__ void wait_for_all_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

using Fragment = std::uint32_t[4];

// Four matrices of 8 x 8, whose rows of 16 bytes lie in shared memory where the lanes say, those of
// the first in lanes 0 to 7.
__device__ inline void load_matrices(Fragment& to, std::uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}
__device__ inline void load_matrices(Fragment& to, const void* from) {
  load_matrices(to, shared_address(from));
}
__device__ inline void load_matrices_transposed(Fragment& to, const void* from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(from))
               : "memory");
}

// c [16, 8] += a [16, 16 channels] times b [8, 16 channels]. Element q of a lane is of row lane / 4
// + q / 2 * 8 and column lane % 4 * 2 + q % 2.
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
