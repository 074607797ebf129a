#include "models/kernels/cuda/cuda_element.cuh"

namespace ferry::models::launch {
namespace {

constexpr std::int64_t kThreads = 256;

// The offsets of N neighbours of one row, in gate_up [rows, 2 * ffn] and in y [rows, ffn].
struct Place {
  std::int64_t gate = 0;
  std::int64_t y = 0;
};

// Calls `body` for each N neighbours of a row that are this thread's.
template <int N, typename Body>
__device__ void for_each_place(std::int64_t rows, std::int64_t ffn, const Body& body) {
  const auto of_row = static_cast<std::uint32_t>(ffn / N);
  const auto all = static_cast<std::uint32_t>(rows) * of_row;
  for (std::uint32_t at = blockIdx.x * blockDim.x + threadIdx.x; at < all;
       at += gridDim.x * blockDim.x) {
    const std::int64_t row = at / of_row;
    const std::int64_t column = static_cast<std::int64_t>(at % of_row) * N;
    body(Place{.gate = row * 2 * ffn + column, .y = row * ffn + column});
  }
}

__device__ float silu(float x) {  // as ATen's silu_kernel
  return __fdiv_rn(x, __fadd_rn(1.0F, ::expf(-x)));
}

template <int N, typename T>
__global__ void gate(const T* gate_up, T* y, std::int64_t rows, std::int64_t ffn) {
  release_dependents();
  wait_for_inputs();
  for_each_place<N>(rows, ffn, [&](Place place) {
    const auto gates = load<N>(gate_up + place.gate);
    const auto ups = load<N>(gate_up + place.gate + ffn);
    Vector<T, N> result;
#pragma unroll
    for (int i = 0; i < N; ++i)
      result.at[i] = narrow<T>(__fmul_rn(rounded<T>(silu(widen(gates.at[i]))), widen(ups.at[i])));
    store(y + place.y, result);
  });
}

// The expert that a row belongs to; the last one for rows behind its end.
__device__ std::int64_t expert_of(std::int64_t row, const std::int32_t* ends, ExpertRows shape) {
  std::int64_t low = 0;
  std::int64_t high = shape.experts - 1;
  while (low < high) {
    const std::int64_t middle = (low + high) / 2;
    if (ends[middle] > row)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

template <int N, typename T>
__global__ void add_biases(
    const T* x, const T* biases, const std::int32_t* ends, T* y, ExpertRows shape) {
  release_dependents();
  wait_for_inputs();
  for_each_place<N>(shape.rows, shape.columns, [&](Place place) {
    const std::int64_t row = place.y / shape.columns;
    const auto values = load<N>(x + place.y);
    const auto more =
        load<N>(biases + expert_of(row, ends, shape) * shape.columns + place.y % shape.columns);
    Vector<T, N> result;
#pragma unroll
    for (int i = 0; i < N; ++i)
      result.at[i] = narrow<T>(__fadd_rn(widen(values.at[i]), widen(more.at[i])));
    store(y + place.y, result);
  });
}

// A rounding for each of ATen's operations.
template <int N, typename T>
__global__ void quick_gate(const T* gate_up,
                           const T* biases,
                           const std::int32_t* ends,
                           T* y,
                           ExpertRows shape,
                           float clamp,
                           float offset) {
  constexpr float kAlpha = 1.702F;
  release_dependents();
  wait_for_inputs();
  for_each_place<N>(shape.rows, shape.columns, [&](Place place) {
    const std::int64_t row = place.y / shape.columns;
    const T* const bias =
        biases + expert_of(row, ends, shape) * 2 * shape.columns + place.y % shape.columns;
    const auto gates = load<N>(gate_up + place.gate);
    const auto ups = load<N>(gate_up + place.gate + shape.columns);
    const auto of_gates = load<N>(bias);
    const auto of_ups = load<N>(bias + shape.columns);
    Vector<T, N> result;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float gate =
          fminf(rounded<T>(__fadd_rn(widen(gates.at[i]), widen(of_gates.at[i]))), clamp);
      const float up =
          fmaxf(fminf(rounded<T>(__fadd_rn(widen(ups.at[i]), widen(of_ups.at[i]))), clamp), -clamp);
      const float scaled = rounded<T>(__fmul_rn(gate, kAlpha));
      const float sigmoid = rounded<T>(__fdiv_rn(1.0F, __fadd_rn(1.0F, ::expf(-scaled))));
      const float gated = rounded<T>(__fmul_rn(gate, sigmoid));
      result.at[i] = narrow<T>(__fmul_rn(rounded<T>(__fadd_rn(up, offset)), gated));
    }
    store(y + place.y, result);
  });
}

template <int N, typename T>
__global__ void grad_of_gate(
    const T* grad_y, const T* gate_up, T* grad, std::int64_t rows, std::int64_t ffn) {
  for_each_place<N>(rows, ffn, [&](Place place) {
    const auto gates = load<N>(gate_up + place.gate);
    const auto ups = load<N>(gate_up + place.gate + ffn);
    const auto grads = load<N>(grad_y + place.y);
    Vector<T, N> of_gates;
    Vector<T, N> of_ups;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float x = widen(gates.at[i]);
      const float dy = widen(grads.at[i]);
      const float of_silu = rounded<T>(dy * widen(ups.at[i]));
      const float sigmoid = __frcp_rn(1.0F + ::expf(-x));
      of_gates.at[i] = narrow<T>(of_silu * sigmoid * (1.0F + x * (1.0F - sigmoid)));
      of_ups.at[i] = narrow<T>(dy * rounded<T>(x * sigmoid));
    }
    store(grad + place.gate, of_gates);
    store(grad + place.gate + ffn, of_ups);
  });
}

// Calls `launch` with the number of neighbours to take at once.
template <typename T, typename Launch>
void by_width(const T* gate_up, const T* y, std::int64_t ffn, const Launch& launch) {
  constexpr int kWide = 16 / sizeof(T);
  if (ffn % kWide == 0 && is_aligned<T, kWide>(gate_up) && is_aligned<T, kWide>(y))
    launch(std::integral_constant<int, kWide>{});
  else
    launch(std::integral_constant<int, 1>{});
}

}  // namespace

cudaError_t swiglu(const void* gate_up,
                   void* y,
                   std::int64_t rows,
                   std::int64_t ffn,
                   Element element,
                   cudaStream_t stream) {
  if (rows * ffn > UINT32_MAX) return cudaErrorInvalidValue;
  return by_element(element, [&](auto* none) {
    using T = std::remove_pointer_t<decltype(none)>;
    const auto* in = static_cast<const T*>(gate_up);
    auto* out = static_cast<T*>(y);
    by_width(in, out, ffn, [&](auto width) {
      (void)launch_dependent(gate<width.value, T>, blocks_of(rows * ffn / width.value, kThreads),
                             kThreads, 0, stream, in, out, rows, ffn);
    });
  });
}

cudaError_t add_expert_biases(const void* x,
                              const void* biases,
                              const std::int32_t* ends,
                              void* y,
                              ExpertRows shape,
                              Element element,
                              cudaStream_t stream) {
  if (shape.rows * shape.columns > UINT32_MAX) return cudaErrorInvalidValue;
  return by_element(element, [&](auto* none) {
    using T = std::remove_pointer_t<decltype(none)>;
    const auto* in = static_cast<const T*>(x);
    const auto* more = static_cast<const T*>(biases);
    by_width(in, more, shape.columns, [&](auto width) {
      (void)launch_dependent(add_biases<width.value, T>,
                             blocks_of(shape.rows * shape.columns / width.value, kThreads),
                             kThreads, 0, stream, in, more, ends, static_cast<T*>(y), shape);
    });
  });
}

cudaError_t quick_geglu(const void* gate_up,
                        const void* biases,
                        const std::int32_t* ends,
                        void* y,
                        ExpertRows shape,
                        float clamp,
                        float offset,
                        Element element,
                        cudaStream_t stream) {
  if (shape.rows * shape.columns > UINT32_MAX) return cudaErrorInvalidValue;
  return by_element(element, [&](auto* none) {
    using T = std::remove_pointer_t<decltype(none)>;
    const auto* in = static_cast<const T*>(gate_up);
    const auto* more = static_cast<const T*>(biases);
    by_width(in, more, shape.columns, [&](auto width) {
      (void)launch_dependent(
          quick_gate<width.value, T>, blocks_of(shape.rows * shape.columns / width.value, kThreads),
          kThreads, 0, stream, in, more, ends, static_cast<T*>(y), shape, clamp, offset);
    });
  });
}

cudaError_t swiglu_backward(const void* grad_y,
                            const void* gate_up,
                            void* grad_gate_up,
                            std::int64_t rows,
                            std::int64_t ffn,
                            Element element,
                            cudaStream_t stream) {
  if (rows * ffn > UINT32_MAX) return cudaErrorInvalidValue;
  return by_element(element, [&](auto* none) {
    using T = std::remove_pointer_t<decltype(none)>;
    const auto* in = static_cast<const T*>(gate_up);
    const auto* of_y = static_cast<const T*>(grad_y);
    by_width(in, of_y, ffn, [&](auto width) {
      grad_of_gate<width.value>
          <<<blocks_of(rows * ffn / width.value, kThreads), kThreads, 0, stream>>>(
              of_y, in, static_cast<T*>(grad_gate_up), rows, ffn);
    });
  });
}

}  // namespace ferry::models::launch
