#include <algorithm>

#include "models/kernels/cuda_element.cuh"

namespace ferry::models::launch {
namespace {

// Hugging Face's apply_rotary_pos_emb: q * cos + rotate_half(q) * sin, three roundings.
template <typename T>
__global__ void turn(
    const T* x, const T* cos, const T* sin, T* y, RotaryShape shape, bool transpose) {
  const std::int64_t half = shape.dim / 2;
  const std::int64_t pairs = shape.tokens * shape.heads * half;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       at < pairs; at += step) {
    const std::int64_t i = at % half;
    const std::int64_t head = at / half % shape.heads;
    const std::int64_t token = at / half / shape.heads;
    const std::int64_t strided = token * shape.token_stride + head * shape.head_stride;
    const std::int64_t strided_low = strided + (shape.interleaved ? 2 * i : i);
    const std::int64_t strided_high = strided + (shape.interleaved ? 2 * i + 1 : i + half);
    const std::int64_t low = (token * shape.heads + head) * shape.dim + i;
    const std::int64_t high = low + half;
    const float cos_low = widen(cos[token * shape.dim + i]);
    const float cos_high = widen(cos[token * shape.dim + i + half]);
    const float sin_low = widen(sin[token * shape.dim + i]);
    const float sin_high = widen(sin[token * shape.dim + i + half]);
    if (transpose) {
      const float a = widen(x[low]);
      const float b = widen(x[high]);
      y[strided_low] = narrow<T>(
          __fadd_rn(rounded<T>(__fmul_rn(a, cos_low)), rounded<T>(__fmul_rn(b, sin_high))));
      y[strided_high] = narrow<T>(
          __fadd_rn(rounded<T>(__fmul_rn(b, cos_high)), -rounded<T>(__fmul_rn(a, sin_low))));
    } else {
      const float a = widen(x[strided_low]);
      const float b = widen(x[strided_high]);
      y[low] = narrow<T>(
          __fadd_rn(rounded<T>(__fmul_rn(a, cos_low)), rounded<T>(__fmul_rn(-b, sin_low))));
      y[high] = narrow<T>(
          __fadd_rn(rounded<T>(__fmul_rn(b, cos_high)), rounded<T>(__fmul_rn(a, sin_high))));
    }
  }
}

}  // namespace

cudaError_t rotary(const void* x,
                   const void* cos,
                   const void* sin,
                   void* y,
                   RotaryShape shape,
                   bool transpose,
                   Element element,
                   cudaStream_t stream) {
  return by_element(element, [&](auto* none) {
    using T = std::remove_pointer_t<decltype(none)>;
    constexpr std::int64_t kThreads = 256;
    constexpr std::int64_t kMostBlocks = 132 * 16;
    const std::int64_t pairs = shape.tokens * shape.heads * (shape.dim / 2);
    const auto blocks = std::clamp<std::int64_t>((pairs + kThreads - 1) / kThreads, 1, kMostBlocks);
    turn<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
        static_cast<const T*>(x), static_cast<const T*>(cos), static_cast<const T*>(sin),
        static_cast<T*>(y), shape, transpose);
  });
}

}  // namespace ferry::models::launch
