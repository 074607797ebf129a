// The kernels of adam.cu, by raw pointers, so that nvcc never sees LibTorch's headers. Each
// launches on `stream` and returns the launch's error.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "trainer/optimizer/kernels/adam_formula.h"

namespace ferry::trainer::launch {

enum class AdamElementType : std::uint8_t { kFloat, kBf16, kHalf };

struct AdamPointers {
  const void* grad = nullptr;
  float* master = nullptr;
  void* exp_avg = nullptr;
  void* exp_avg_sq = nullptr;
  bool exp_avg_bf16 = false;  // else fp32
  bool exp_avg_sq_bf16 = false;
  void* param = nullptr;                 // or null: masters are the parameters
  const std::uint8_t* decays = nullptr;  // of each 64 elements
};
cudaError_t adam(const AdamPointers& at,
                 std::int64_t elements,  // a multiple of 64
                 AdamElementType grad,
                 AdamElementType param,
                 const AdamFactors& factors,
                 cudaStream_t stream);

// partial: [squared_sum_partials(elements)], in the order of x.
std::int64_t squared_sum_partials(std::int64_t elements);
cudaError_t squared_sum(const void* x,
                        std::int64_t elements,
                        AdamElementType element,
                        double* partial,
                        cudaStream_t stream);

}  // namespace ferry::trainer::launch
