#include "distckpt/base/integers.h"
#include "models/kernels/cuda/cuda_element.cuh"
#include "rollout/kernels/step_copies_launch.h"

namespace ferry::rollout::launch {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kPair = sizeof(longlong2);

__device__ std::int64_t known(std::int64_t token, const std::int64_t* drawn) {
  return token < 0 ? drawn[-1 - token] : token;
}

__global__ void upload(const longlong2* host,
                       longlong2* device,
                       std::int64_t pairs,
                       std::int64_t num_tokens,
                       const std::int64_t* drawn) {
  for (std::int64_t at = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; at < pairs;
       at += std::int64_t{gridDim.x} * blockDim.x) {
    auto pair = __ldcv(host + at);  // the host has written it since it was read last
    if (2 * at < num_tokens) pair.x = known(pair.x, drawn);
    if (2 * at + 1 < num_tokens) pair.y = known(pair.y, drawn);
    device[at] = pair;
  }
}

__global__ void download(DrawnPointers device, DrawnPointers host, std::int64_t rows) {
  const auto row = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  host.tokens[row] = device.tokens[row];
  host.logprobs[row] = device.logprobs[row];
  host.processed_logprobs[row] = device.processed_logprobs[row];
}

}  // namespace

cudaError_t upload_step(const void* host,
                        void* device,
                        std::int64_t bytes,
                        std::int64_t num_tokens,
                        const std::int64_t* drawn,
                        cudaStream_t stream) {
  const auto pairs = distckpt::ceil_div(bytes, kPair);
  upload<<<models::launch::blocks_of(pairs, kThreads), kThreads, 0, stream>>>(
      static_cast<const longlong2*>(host), static_cast<longlong2*>(device), pairs, num_tokens,
      drawn);
  return cudaGetLastError();
}

cudaError_t download_step(DrawnPointers device,
                          DrawnPointers host,
                          std::int64_t rows,
                          cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(distckpt::ceil_div(rows, kThreads));
  download<<<blocks, kThreads, 0, stream>>>(device, host, rows);
  return cudaGetLastError();
}

}  // namespace ferry::rollout::launch
