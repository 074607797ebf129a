// The kernels of step_copies.cu, by raw pointers, so that nvcc never sees LibTorch's headers. They
// launch on `stream` and return the launch's error. Memory of the host is pinned.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace ferry::rollout::launch {

cudaError_t upload_step(const void* host,
                        void* device,
                        std::int64_t bytes,
                        std::int64_t num_tokens,
                        const std::int64_t* drawn,
                        cudaStream_t stream);

struct DrawnPointers {
  std::int64_t* tokens = nullptr;
  float* logprobs = nullptr;
  float* processed_logprobs = nullptr;
};
cudaError_t download_step(DrawnPointers device,
                          DrawnPointers host,
                          std::int64_t rows,
                          cudaStream_t stream);

}  // namespace ferry::rollout::launch
