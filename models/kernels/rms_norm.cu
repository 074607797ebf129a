#include "models/kernels/cuda/cuda_element.cuh"

// The sum of squares is ATen's tree for 16 rows and more (ATen/native/cuda/Reduce.cuh): 32 lanes
// read four neighbours at a time into four accumulators, which are added in order, then the lanes
// by halves, from the largest distance down. From 8192 channels on 16 warps share a row.
namespace ferry::models::launch {
namespace {

constexpr int kVector = 4;
constexpr int kWarps = 16;
constexpr std::int64_t kManyChannels = 8192;
constexpr std::int64_t kFewRows = 132 * 8;
constexpr std::int64_t kFewestChannelsOfFew = 512;
constexpr int kThreadsOfFew = 256;
constexpr std::int64_t kRowsOfPartial = 64;

__device__ float add_lanes(float value) {
  for (int distance = kLanes / 2; distance > 0; distance /= 2)
    value = __fadd_rn(value, __shfl_down_sync(0xffffffffu, value, distance));
  return value;  // in lane 0
}

// Four neighbours. With `aligned` they are read at once, and must be aligned.
template <typename T>
__device__ Vector<T, kVector> four(const T* x, bool aligned) {
  if (aligned) return load<kVector>(x);
  Vector<T, kVector> result;
  for (int i = 0; i < kVector; ++i) result.at[i] = x[i];
  return result;
}

// The row that is normed: x, or x + delta, which is written to `sum`.
template <typename T>
struct Row {
  const T* x = nullptr;
  const T* delta = nullptr;  // or null
  T* sum = nullptr;

  __device__ Row at(std::int64_t first) const {
    return {x + first, delta == nullptr ? nullptr : delta + first,
            sum == nullptr ? nullptr : sum + first};
  }
  __device__ const T* normed() const { return delta == nullptr ? x : sum; }
};

template <typename T>
__device__ float sum_of_squares(const Row<T>& row, std::int64_t channels, int lane, int step) {
  float sums[kVector] = {};
  if (channels < kLanes * kVector) {
    for (int i = 0; i < kVector && lane + i * kLanes < channels; ++i) {
      const int c = lane + i * kLanes;
      T value = row.x[c];
      if (row.delta != nullptr)
        row.sum[c] = value = narrow<T>(__fadd_rn(widen(value), widen(row.delta[c])));
      const float x = widen(value);
      sums[i] = __fmul_rn(x, x);
    }
  } else {
    const bool aligned = is_aligned<T, kVector>(row.x) && is_aligned<T, kVector>(row.delta);
    for (std::int64_t at = lane; at * kVector < channels; at += step) {
      auto in = four(row.x + at * kVector, aligned);
      if (row.delta != nullptr) {
        const auto delta = four(row.delta + at * kVector, aligned);
#pragma unroll
        for (int i = 0; i < kVector; ++i)
          in.at[i] = narrow<T>(__fadd_rn(widen(in.at[i]), widen(delta.at[i])));
        store(row.sum + at * kVector, in);  // of its own memory, which is aligned
      }
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float x = widen(in.at[i]);
        sums[i] = __fadd_rn(sums[i], __fmul_rn(x, x));
      }
    }
  }
  return __fadd_rn(__fadd_rn(__fadd_rn(sums[0], sums[1]), sums[2]), sums[3]);
}

// A normed value that the weight multiplies.
template <typename T>
__device__ float normed(float value, RmsNormShape shape) {
  return shape.rounds_once ? value : rounded<T>(value);
}

// The number that multiplies a normed value.
template <typename T>
__device__ float factor(T weight, RmsNormShape shape) {
  return shape.adds_one ? __fadd_rn(1.0F, widen(weight)) : widen(weight);
}

template <typename T>
__device__ void scale_row(
    const T* x, const T* weight, T* y, RmsNormShape shape, float inverse_rms, int first, int step) {
  const std::int64_t channels = shape.channels;
  const auto scale = [&](T value, T by) {
    return narrow<T>(
        __fmul_rn(factor(by, shape), normed<T>(__fmul_rn(widen(value), inverse_rms), shape)));
  };
  if (channels % kVector != 0 || !is_aligned<T, kVector>(x) || !is_aligned<T, kVector>(weight) ||
      !is_aligned<T, kVector>(y)) {
    for (std::int64_t c = first; c < channels; c += step) y[c] = scale(x[c], weight[c]);
    return;
  }
  for (std::int64_t c = static_cast<std::int64_t>(first) * kVector; c < channels;
       c += static_cast<std::int64_t>(step) * kVector) {
    const auto in = load<kVector>(x + c);
    const auto by = load<kVector>(weight + c);
    Vector<T, kVector> out;
#pragma unroll
    for (int i = 0; i < kVector; ++i) out.at[i] = scale(in.at[i], by.at[i]);
    store(y + c, out);
  }
}

__device__ float inverse_root(float sum, RmsNormShape shape) {
  const float mean = __fmul_rn(sum, __fdiv_rn(1.0F, static_cast<float>(shape.channels)));
  return ::rsqrt(__fadd_rn(mean, shape.epsilon));
}

// A warp for each row.
template <typename T>
__global__ void norm_by_warps(
    Row<T> rows, const T* weight, T* y, float* inverse_rms, RmsNormShape shape) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= shape.rows) return;
  const int lane = static_cast<int>(threadIdx.x);
  const auto in = rows.at(row * shape.channels);
  const float sum = add_lanes(sum_of_squares(in, shape.channels, lane, kLanes));
  const float root = __shfl_sync(0xffffffffu, inverse_root(sum, shape), 0);
  if (lane == 0) inverse_rms[row] = root;
  __syncwarp();  // the sum has been written
  scale_row(in.normed(), weight, y + row * shape.channels, shape, root, lane, kLanes);
}

// A block for each row, where rows are few and a single warp would wait for memory at every step:
// all threads fetch, one warp sums, in the warp's order.
template <typename T>
__global__ void norm_few(
    Row<T> rows, const T* weight, T* y, float* inverse_rms, RmsNormShape shape) {
  __shared__ alignas(16) T copy[kManyChannels];
  __shared__ float shared_root;
  release_dependents();
  constexpr int kMost = kManyChannels / (kThreadsOfFew * kVector);
  const int thread = static_cast<int>(threadIdx.x);
  const auto in = rows.at(static_cast<std::int64_t>(blockIdx.x) * shape.channels);
  Vector<T, kVector> mine[kMost];
  Vector<T, kVector> by[kMost];
  const auto for_each = [&](const auto& body) {
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const int c = (i * kThreadsOfFew + thread) * kVector;
      if (c < shape.channels) body(i, c);
    }
  };
  if (shape.gathered_weight) wait_for_inputs();
  for_each([&](int i, int c) { by[i] = load<kVector>(weight + c); });
  wait_for_inputs();
  for_each([&](int i, int c) {
    mine[i] = load<kVector>(in.x + c);
    if (in.delta == nullptr) return;
    const auto delta = load<kVector>(in.delta + c);
#pragma unroll
    for (int j = 0; j < kVector; ++j)
      mine[i].at[j] = narrow<T>(__fadd_rn(widen(mine[i].at[j]), widen(delta.at[j])));
  });
  for_each([&](int i, int c) {
    store(copy + c, mine[i]);
    if (in.delta != nullptr) store(in.sum + c, mine[i]);
  });
  __syncthreads();
  if (thread < kLanes) {
    const float sum = add_lanes(sum_of_squares(Row<T>{.x = copy}, shape.channels, thread, kLanes));
    if (thread == 0) inverse_rms[blockIdx.x] = shared_root = inverse_root(sum, shape);
  }
  __syncthreads();
  const float root = shared_root;
  for_each([&](int i, int c) {
    Vector<T, kVector> out;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const float value = normed<T>(__fmul_rn(widen(mine[i].at[j]), root), shape);
      out.at[j] = narrow<T>(__fmul_rn(factor(by[i].at[j], shape), value));
    }
    store(y + static_cast<std::int64_t>(blockIdx.x) * shape.channels + c, out);
  });
}

// A block of kWarps for each row.
template <typename T>
__global__ void norm_by_blocks(
    Row<T> rows, const T* weight, T* y, float* inverse_rms, RmsNormShape shape) {
  __shared__ float sums[kWarps];
  const std::int64_t row = blockIdx.x;
  const int lane = static_cast<int>(threadIdx.x);
  const int warp = static_cast<int>(threadIdx.y);
  const auto in = rows.at(row * shape.channels);
  const int thread = warp * kLanes + lane;
  const float sum = add_lanes(sum_of_squares(in, shape.channels, thread, kWarps * kLanes));
  if (lane == 0) sums[warp] = sum;
  for (int distance = kWarps / 2; distance > 0; distance /= 2) {
    __syncthreads();
    if (lane == 0 && warp < distance) sums[warp] = __fadd_rn(sums[warp], sums[warp + distance]);
  }
  __syncthreads();
  const float root = inverse_root(sums[0], shape);
  if (thread == 0) inverse_rms[row] = root;
  scale_row(in.normed(), weight, y + row * shape.channels, shape, root, thread, kWarps * kLanes);
}

// grad_x = r * g - x * r^3 / channels * sum(g * x), where g = grad_y * weight (or 1 + weight), N
// channels at once. A block for each row.
template <int N, typename T>
__global__ void grad_of_x(const T* grad_y,
                          const T* x,
                          const T* weight,
                          const float* inverse_rms,
                          const T* grad_sum,  // or null
                          T* grad_x,
                          RmsNormShape shape) {
  __shared__ float sums[kWarps];
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * shape.channels;
  const int lane = static_cast<int>(threadIdx.x);
  const int warp = static_cast<int>(threadIdx.y);
  const int warps = static_cast<int>(blockDim.y);
  const int thread = warp * kLanes + lane;
  // Calls `body(channel, g, x)` for each N channels that are this thread's.
  const auto for_each = [&](const auto& body) {
    for (std::int64_t c = static_cast<std::int64_t>(thread) * N; c < shape.channels;
         c += static_cast<std::int64_t>(warps) * kLanes * N) {
      const auto grads = load<N>(grad_y + first + c);
      const auto by = load<N>(weight + c);
      float g[N];
#pragma unroll
      for (int i = 0; i < N; ++i)
        g[i] = normed<T>(widen(grads.at[i]) * factor(by.at[i], shape), shape);
      body(c, g, load<N>(x + first + c));
    }
  };
  float sum = 0;
  for_each([&](std::int64_t, const float* g, const Vector<T, N>& in) {
#pragma unroll
    for (int i = 0; i < N; ++i) sum += g[i] * widen(in.at[i]);
  });
  sum = add_lanes(sum);
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  float total = 0;
  for (int w = 0; w < warps; ++w) total += sums[w];
  const float root = inverse_rms[blockIdx.x];
  const float share = total * root * root * root / static_cast<float>(shape.channels);
  for_each([&](std::int64_t c, const float* g, const Vector<T, N>& in) {
    Vector<T, N> out;
    Vector<T, N> more{};
    if (grad_sum != nullptr) more = load<N>(grad_sum + first + c);
#pragma unroll
    for (int i = 0; i < N; ++i)
      out.at[i] = narrow<T>(root * g[i] - share * widen(in.at[i]) + widen(more.at[i]));
    store(grad_x + first + c, out);
  });
}

// Sums of kRowsOfPartial rows each: the same ones at every run.
template <typename T>
__global__ void grad_of_weight(
    const T* grad_y, const T* x, const float* inverse_rms, float* partial, RmsNormShape shape) {
  const std::int64_t c = static_cast<std::int64_t>(blockIdx.y) * blockDim.x + threadIdx.x;
  if (c >= shape.channels) return;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kRowsOfPartial;
  float sum = 0;
  for (std::int64_t row = first; row < min(first + kRowsOfPartial, shape.rows); ++row) {
    const std::int64_t at = row * shape.channels + c;
    sum += widen(grad_y[at]) * normed<T>(__fmul_rn(widen(x[at]), inverse_rms[row]), shape);
  }
  partial[static_cast<std::int64_t>(blockIdx.x) * shape.channels + c] = sum;
}

}  // namespace

std::int64_t rms_norm_partials(std::int64_t rows) {
  return ceil_div(rows, kRowsOfPartial);
}

cudaError_t rms_norm(const void* x,
                     const void* delta,
                     const void* weight,
                     void* sum,
                     void* y,
                     float* inverse_rms,
                     RmsNormShape shape,
                     Element element,
                     cudaStream_t stream) {
  return by_element(element, [&](auto* none) {
    using T = std::remove_pointer_t<decltype(none)>;
    const Row<T> in{static_cast<const T*>(x), static_cast<const T*>(delta), static_cast<T*>(sum)};
    const auto* w = static_cast<const T*>(weight);
    auto* out = static_cast<T*>(y);
    if (shape.channels >= kManyChannels) {
      norm_by_blocks<<<static_cast<unsigned>(shape.rows), dim3(kLanes, kWarps), 0, stream>>>(
          in, w, out, inverse_rms, shape);
    } else if (shape.rows <= kFewRows && shape.channels >= kFewestChannelsOfFew &&
               shape.channels % kVector == 0 && is_aligned<T, kVector>(in.x) &&
               is_aligned<T, kVector>(in.delta) && is_aligned<T, kVector>(w)) {
      (void)launch_dependent(norm_few<T>, static_cast<unsigned>(shape.rows), kThreadsOfFew, 0,
                             stream, in, w, out, inverse_rms, shape);
    } else {
      constexpr int kRows = 4;
      norm_by_warps<<<static_cast<unsigned>(ceil_div(shape.rows, kRows)), dim3(kLanes, kRows), 0,
                      stream>>>(in, w, out, inverse_rms, shape);
    }
  });
}

cudaError_t rms_norm_backward(const void* grad_y,
                              const void* x,
                              const void* weight,
                              const float* inverse_rms,
                              const void* grad_sum,
                              void* grad_x,
                              float* partial_weight,
                              RmsNormShape shape,
                              Element element,
                              cudaStream_t stream) {
  return by_element(element, [&](auto* none) {
    using T = std::remove_pointer_t<decltype(none)>;
    const auto* grad = static_cast<const T*>(grad_y);
    const auto* in = static_cast<const T*>(x);
    const auto* by = static_cast<const T*>(weight);
    const auto* more = static_cast<const T*>(grad_sum);
    auto* out = static_cast<T*>(grad_x);
    constexpr int kWide = 16 / sizeof(T);
    const auto of_x = [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      const auto warps = static_cast<unsigned>(
          std::clamp<std::int64_t>(ceil_div(shape.channels / kWidth, kLanes), 1, kWarps));
      grad_of_x<kWidth><<<static_cast<unsigned>(shape.rows), dim3(kLanes, warps), 0, stream>>>(
          grad, in, by, inverse_rms, more, out, shape);
    };
    if (shape.channels % kWide == 0 && is_aligned<T, kWide>(grad) && is_aligned<T, kWide>(in) &&
        is_aligned<T, kWide>(by) && is_aligned<T, kWide>(more) && is_aligned<T, kWide>(out))
      of_x(std::integral_constant<int, kWide>{});
    else
      of_x(std::integral_constant<int, 1>{});
    constexpr int kThreads = 128;
    // The y of a grid ends at 65,535.
    const dim3 grid(static_cast<unsigned>(rms_norm_partials(shape.rows)),
                    static_cast<unsigned>(ceil_div(shape.channels, kThreads)));
    grad_of_weight<<<grid, kThreads, 0, stream>>>(grad, in, inverse_rms, partial_weight, shape);
  });
}

}  // namespace ferry::models::launch
