#include <algorithm>

#include "models/kernels/cuda_element.cuh"

namespace ferry::models::launch {
namespace {

constexpr std::int64_t kThreads = 256;
constexpr std::int64_t kMostBlocks = 132 * 16;

unsigned blocks_of(std::int64_t elements) {
  return static_cast<unsigned>(
      std::clamp<std::int64_t>((elements + kThreads - 1) / kThreads, 1, kMostBlocks));
}

__device__ float silu(float x) {  // as ATen's silu_kernel
  return __fdiv_rn(x, __fadd_rn(1.0F, ::expf(-x)));
}

template <typename T>
__global__ void gate(const T* gate_up, T* y, std::int64_t rows, std::int64_t ffn) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       at < rows * ffn; at += step) {
    const T* row = gate_up + at / ffn * 2 * ffn + at % ffn;
    y[at] = narrow<T>(__fmul_rn(rounded<T>(silu(widen(row[0]))), widen(row[ffn])));
  }
}

template <typename T>
__global__ void grad_of_gate(
    const T* grad_y, const T* gate_up, T* grad, std::int64_t rows, std::int64_t ffn) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       at < rows * ffn; at += step) {
    const std::int64_t first = at / ffn * 2 * ffn + at % ffn;
    const float x = widen(gate_up[first]);
    const float dy = widen(grad_y[at]);
    const float of_silu = rounded<T>(dy * widen(gate_up[first + ffn]));
    const float sigmoid = 1.0F / (1.0F + ::expf(-x));
    grad[first] = narrow<T>(of_silu * sigmoid * (1.0F + x * (1.0F - sigmoid)));
    grad[first + ffn] = narrow<T>(dy * rounded<T>(silu(x)));
  }
}

}  // namespace

cudaError_t swiglu(const void* gate_up,
                   void* y,
                   std::int64_t rows,
                   std::int64_t ffn,
                   Element element,
                   cudaStream_t stream) {
  return by_element(element, [&](auto* none) {
    using T = std::remove_pointer_t<decltype(none)>;
    gate<<<blocks_of(rows * ffn), kThreads, 0, stream>>>(static_cast<const T*>(gate_up),
                                                         static_cast<T*>(y), rows, ffn);
  });
}

cudaError_t swiglu_backward(const void* grad_y,
                            const void* gate_up,
                            void* grad_gate_up,
                            std::int64_t rows,
                            std::int64_t ffn,
                            Element element,
                            cudaStream_t stream) {
  return by_element(element, [&](auto* none) {
    using T = std::remove_pointer_t<decltype(none)>;
    grad_of_gate<<<blocks_of(rows * ffn), kThreads, 0, stream>>>(
        static_cast<const T*>(grad_y), static_cast<const T*>(gate_up),
        static_cast<T*>(grad_gate_up), rows, ffn);
  });
}

}  // namespace ferry::models::launch
