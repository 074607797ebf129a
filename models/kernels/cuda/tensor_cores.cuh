// Instructions of a warp's products in bf16, and of copies into shared memory beside them.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace ferry::models::launch {

// Copies 16 bytes to an address of shared memory. Copies of a thread between two calls of
// commit_copies() form a group.
__device__ inline void copy_async(std::uint32_t to, const __nv_bfloat16* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from)
               : "memory");
}
__device__ inline void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits for all of this thread's groups but the last kLeft.
template <int kLeft>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// Four matrices of 8 x 8, whose rows of 16 bytes lie where the lanes' addresses of shared memory
// say, those of the first in lanes 0 to 7.
__device__ inline void read_matrices(std::uint32_t from, std::uint32_t (&to)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

// sums [16 lines, 8 rows] += lines [16, 16 channels] times rows [8, 16 channels]. Element q of a
// lane is of line lane / 4 + q / 2 * 8 and of row lane % 4 * 2 + q % 2.
__device__ inline void multiply_add(const std::uint32_t (&lines)[4],
                                    std::uint32_t rows,
                                    std::uint32_t rows_behind,
                                    float (&sums)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(lines[0]), "r"(lines[1]), "r"(lines[2]), "r"(lines[3]), "r"(rows), "r"(rows_behind));
}

}  // namespace ferry::models::launch
