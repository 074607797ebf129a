#include "models/kernels/cuda/cuda_element.cuh"
#include "models/kernels/cuda/gated_units.cuh"

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
      result.at[i] = narrow<T>(swiglu_of<T>(widen(gates.at[i]), widen(ups.at[i])));
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

// The bias of the expert of a place's row, from the place's column on.
template <typename T>
__device__ const T* bias_at(Place place,
                            const T* biases,
                            const std::int32_t* ends,
                            ExpertRows shape) {
  return biases + expert_of(place.y / shape.columns, ends, shape) * 2 * shape.columns +
         place.y % shape.columns;
}

template <int N, typename T>
__global__ void quick_gate(const T* gate_up,
                           const T* biases,
                           const std::int32_t* ends,
                           T* y,
                           ExpertRows shape,
                           float clamp,
                           float offset) {
  release_dependents();
  wait_for_inputs();
  for_each_place<N>(shape.rows, shape.columns, [&](Place place) {
    const T* const bias = bias_at(place, biases, ends, shape);
    const auto gates = load<N>(gate_up + place.gate);
    const auto ups = load<N>(gate_up + place.gate + shape.columns);
    const auto of_gates = load<N>(bias);
    const auto of_ups = load<N>(bias + shape.columns);
    Vector<T, N> result;
#pragma unroll
    for (int i = 0; i < N; ++i)
      result.at[i] = narrow<T>(quick_geglu_of<T>(
          rounded<T>(__fadd_rn(widen(gates.at[i]), widen(of_gates.at[i]))),
          rounded<T>(__fadd_rn(widen(ups.at[i]), widen(of_ups.at[i]))), clamp, offset));
    store(y + place.y, result);
  });
}

// The gradient of gate_up; a value that is clamped has none.
template <int N, typename T>
__global__ void grad_of_quick_gate(const T* grad_y,
                                   const T* gate_up,
                                   const T* biases,
                                   const std::int32_t* ends,
                                   T* grad,
                                   ExpertRows shape,
                                   float clamp,
                                   float offset) {
  for_each_place<N>(shape.rows, shape.columns, [&](Place place) {
    const T* const bias = bias_at(place, biases, ends, shape);
    const auto gates = load<N>(gate_up + place.gate);
    const auto ups = load<N>(gate_up + place.gate + shape.columns);
    const auto of_gate = load<N>(bias);
    const auto of_up = load<N>(bias + shape.columns);
    const auto grads = load<N>(grad_y + place.y);
    Vector<T, N> of_gates;
    Vector<T, N> of_ups;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float gate = rounded<T>(__fadd_rn(widen(gates.at[i]), widen(of_gate.at[i])));
      const float up = rounded<T>(__fadd_rn(widen(ups.at[i]), widen(of_up.at[i])));
      const float low = fminf(gate, clamp);
      const float plus = rounded<T>(fmaxf(fminf(up, clamp), -clamp) + offset);
      const float sigmoid = __frcp_rn(1.0F + ::expf(-kQuickAlpha * low));
      const float dy = widen(grads.at[i]);
      const float slope = sigmoid * (1.0F + kQuickAlpha * low * (1.0F - sigmoid));
      of_gates.at[i] = narrow<T>(gate <= clamp ? dy * plus * slope : 0.0F);
      of_ups.at[i] = narrow<T>(fabsf(up) <= clamp ? dy * rounded<T>(low * sigmoid) : 0.0F);
    }
    store(grad + place.gate, of_gates);
    store(grad + place.gate + shape.columns, of_ups);
  });
}

constexpr int kWarpsOfSum = 16;

// A block sums some columns of the rows of one expert: each warp every 16th row, then the warps one
// after another, so that the order of a sum depends on the expert's rows alone.
template <int N, typename T>
__global__ void __launch_bounds__(kWarpsOfSum* kLanes)
    sum_rows(const T* rows, const std::int32_t* ends, T* sums, std::int64_t columns) {
  constexpr int kColumns = kLanes * N;  // of a block
  __shared__ float of_warps[kWarpsOfSum][kColumns];
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  const std::int64_t expert = blockIdx.y;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kColumns;
  const std::int64_t column = first + lane * N;
  const std::int64_t begin = expert == 0 ? 0 : ends[expert - 1];
  const std::int64_t end = ends[expert];
  float sum[N] = {};
  if (column < columns) {
#pragma unroll 4
    for (std::int64_t row = begin + warp; row < end; row += kWarpsOfSum) {
      const auto values = load<N>(rows + row * columns + column);
#pragma unroll
      for (int i = 0; i < N; ++i) sum[i] += widen(values.at[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) of_warps[warp][lane * N + i] = sum[i];
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kColumns; i += kWarpsOfSum * kLanes) {
    if (first + i >= columns) break;
    float total = 0;
    for (int part = 0; part < kWarpsOfSum; ++part) total += of_warps[part][i];
    sums[expert * columns + first + i] = narrow<T>(total);
  }
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

cudaError_t quick_geglu_backward(const void* grad_y,
                                 const void* gate_up,
                                 const void* biases,
                                 const std::int32_t* ends,
                                 void* grad_gate_up,
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
      grad_of_quick_gate<width.value>
          <<<blocks_of(shape.rows * shape.columns / width.value, kThreads), kThreads, 0, stream>>>(
              static_cast<const T*>(grad_y), in, more, ends, static_cast<T*>(grad_gate_up), shape,
              clamp, offset);
    });
  });
}

cudaError_t sum_expert_rows(const void* rows,
                            const std::int32_t* ends,
                            void* sums,
                            ExpertRows shape,
                            Element element,
                            cudaStream_t stream) {
  return by_element(element, [&](auto* none) {
    using T = std::remove_pointer_t<decltype(none)>;
    const auto* in = static_cast<const T*>(rows);
    auto* out = static_cast<T*>(sums);
    by_width(in, in, shape.columns, [&](auto width) {
      constexpr int kOfBlock = kLanes * width.value;
      const dim3 blocks(static_cast<unsigned>(ceil_div(shape.columns, kOfBlock)),
                        static_cast<unsigned>(shape.experts));
      sum_rows<width.value>
          <<<blocks, kWarpsOfSum * kLanes, 0, stream>>>(in, ends, out, shape.columns);
    });
  });
}

}  // namespace ferry::models::launch
