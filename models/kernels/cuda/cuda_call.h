// What every call of a kernel of ours needs: the stream to launch on, and an Error for what failed.
// In builds with CUDA alone.
#pragma once

#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "distckpt/base/error.h"

namespace ferry::models {

// Throws Error(kDevice).
inline void check(cudaError_t status) {
  require(status == cudaSuccess, ErrorKind::kDevice, "CUDA: {}", cudaGetErrorString(status));
}

// LibTorch's current one.
inline cudaStream_t stream() {
  return c10::cuda::getCurrentCUDAStream().stream();
}

}  // namespace ferry::models
