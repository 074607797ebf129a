// Products of rows with a weight on a GPU, such that a row of the result has the same bits whatever
// rows stand beside it and however the weight's rows are sliced over ranks: each element is one sum
// along K, in one order, with one accumulator.
//
// bf16: cuBLASLt's kernels without split-K are one such class (docs/numerics.md), and one of our
// own for up to 8 rows (ordered_rows.cu). Among these and those that the heuristic offers for N, K
// and a bucket of M, the fastest is measured once and taken: at the first product of its bucket,
// which must come before a CUDA graph is captured. fp32: a kernel of our own, one chain of fused
// multiply-adds, with the bits of cuBLASLt's kernels for M > 16 that have no workspace to split K
// in.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace ferry::models {

// x [rows, K], weight [N, K], bias [N] or undefined -> [rows, N]; bf16 or fp32, on one GPU. Not
// differentiable. Throws Error(kDevice) where cuBLASLt has no kernel without split-K.
at::Tensor gemm_nt(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);
// gemm_nt() of both in fp32, which bf16 is not copied for.
at::Tensor gemm_nt_in_fp32(const at::Tensor& x, const at::Tensor& weight);

// True if sums of instructions of 16 channels, one after the other (ordered_columns.cuh), have
// gemm_nt()'s bits for up to 8 rows of this weight's shape, bf16 without a bias: measured once,
// outside of CUDA graphs.
bool adds_in_order(const at::Tensor& weight);

// A kernel that this process has chosen.
struct GemmChoice {
  std::int64_t n = 0;
  std::int64_t k = 0;
  std::int64_t bucket = 0;
  bool has_bias = false;
  int candidates = 0;  // without split-K, of one class
  int dropped = 0;     // split K, or gave other bits than the class
  int algorithm = -1;  // cuBLASLt's numbers; -1: the kernel of our own
  int tile = 0;
  int stages = 0;
  double microseconds = 0;
};
std::vector<GemmChoice> gemm_choices();

// Name and value of everything that the bits of a product may depend on: versions of CUDA's
// runtime, its driver and cuBLASLt, and the current device.
std::vector<std::pair<std::string, std::string>> gemm_environment();

}  // namespace ferry::models
