// Helpers of every kernel call: the stream to launch on, and an Error for a CUDA call that failed.
// Only in builds with CUDA.
#pragma once

#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "distckpt/base/error.h"

namespace ferry::models {

// Throws Error(kDevice) unless the call succeeded.
inline void check(cudaError_t status) {
  require(status == cudaSuccess, ErrorKind::kDevice, "CUDA: {}", cudaGetErrorString(status));
}

// LibTorch's current stream.
inline cudaStream_t stream() {
  return c10::cuda::getCurrentCUDAStream().stream();
}

}  // namespace ferry::models
