// Reading and rounding elements of a kernel's tensors. Sums and products are by intrinsics that the
// compiler never contracts to a fused multiply-add, which would skip a rounding of Hugging Face's.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>

#include "distckpt/base/integers.h"
#include "models/kernels/cuda/cuda_launch.h"

namespace ferry::models::launch {

using distckpt::ceil_div;  // constexpr of the host, which nvcc compiles for kernels, too
using distckpt::round_up;

constexpr int kLanes = 32;  // of a warp

__device__ inline float widen(float x) {
  return x;
}
__device__ inline float widen(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
template <typename T>
__device__ T narrow(float x);
template <>
__device__ inline float narrow<float>(float x) {
  return x;
}
template <>
__device__ inline __nv_bfloat16 narrow<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// x rounded to the tensors' type.
template <typename T>
__device__ float rounded(float x) {
  return widen(narrow<T>(x));
}

__device__ inline std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// Neighbours that are read and written at once, where they lie aligned.
template <typename T, int N>
struct alignas(sizeof(T) * N) Vector {
  T at[N];
};
template <typename T, int N>
__host__ __device__ bool is_aligned(const T* x) {
  return reinterpret_cast<std::uintptr_t>(x) % sizeof(Vector<T, N>) == 0;
}
template <int N, typename T>
__device__ Vector<T, N> load(const T* x) {
  return *reinterpret_cast<const Vector<T, N>*>(x);
}
template <int N, typename T>
__device__ void store(T* x, const Vector<T, N>& value) {
  *reinterpret_cast<Vector<T, N>*>(x) = value;
}

// Blocks of a kernel whose threads step through `work` items.
inline unsigned blocks_of(std::int64_t work, std::int64_t threads) {
  constexpr std::int64_t kMostBlocks = 132 * 16;
  return static_cast<unsigned>(std::clamp<std::int64_t>(ceil_div(work, threads), 1, kMostBlocks));
}

// Kernels that begin while the one before them ends (programmatic dependent launch): before
// wait_for_inputs() they touch no memory that a kernel of the stream writes. A kernel that calls
// release_dependents() lets the next one begin beside it.
__device__ inline void wait_for_inputs() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ inline void release_dependents() {
  asm volatile("griddepcontrol.launch_dependents;");
}
// `cluster`: blocks, neighbours along x, that form a cluster each; 1: none do.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_dependent_clusters(void (*kernel)(Parameters...),
                                      unsigned cluster,
                                      dim3 blocks,
                                      dim3 threads,
                                      std::size_t shared_bytes,
                                      cudaStream_t stream,
                                      Arguments... arguments) {
  constexpr std::size_t kUsualShared = 48 << 10;
  if (shared_bytes > kUsualShared) {
    const auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(shared_bytes));
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {.x = cluster, .y = 1, .z = 1};
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}
template <typename... Parameters, typename... Arguments>
cudaError_t launch_dependent(void (*kernel)(Parameters...),
                             dim3 blocks,
                             dim3 threads,
                             std::size_t shared_bytes,
                             cudaStream_t stream,
                             Arguments... arguments) {
  return launch_dependent_clusters(kernel, 1, blocks, threads, shared_bytes, stream, arguments...);
}

// Calls `launch` with a null pointer of the element's type.
template <typename Launch>
cudaError_t by_element(Element element, const Launch& launch) {
  if (element == Element::kFloat)
    launch(static_cast<float*>(nullptr));
  else
    launch(static_cast<__nv_bfloat16*>(nullptr));
  return cudaGetLastError();
}

}  // namespace ferry::models::launch
