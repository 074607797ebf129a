// The kernels of draw.cu, by raw pointers, so that nvcc never sees LibTorch's headers. They launch
// on `stream` and return the launch's error.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "rollout/kernels/draw_row.h"

namespace ferry::rollout::launch {

struct DrawTensors {
  const void* logits = nullptr;  // [rows, row_stride]
  bool is_float = false;         // else bf16
  std::int64_t row_stride = 0;
  std::int64_t vocab_size = 0;
  std::int64_t* tokens = nullptr;       // [rows]
  float* processed_logprobs = nullptr;  // [rows], of shaped rows
  bool* kept = nullptr;                 // [shaped rows, vocab_size], or none
};

// Overwrites the rows: each copy of them serves one draw.
cudaError_t draw_plain(const DrawTensors& tensors,
                       DrawRow* rows,
                       std::int64_t count,
                       cudaStream_t stream);
// z [count, vocab_size]: scratch memory of the kernel.
cudaError_t draw_shaped(const DrawTensors& tensors,
                        const DrawRow* rows,
                        std::int64_t count,
                        const LogitChange* changes,
                        float* z,
                        cudaStream_t stream);

}  // namespace ferry::rollout::launch
