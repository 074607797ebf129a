#include <cfloat>

#include "models/kernels/cuda_element.cuh"

// The sum of a row is that of ATen's log_softmax for more than 12,288 columns (ATen/native/cuda/
// SoftMax.cu, cunn_SoftMaxForward with a row that begins at a multiple of 16 bytes): 1024 threads
// read four neighbours at a time and add one after another, the rest of the row one by one; then
// the lanes of a warp by halves, from the largest distance down, then the warps in the same way.
// And as ATen does it, dividing by a number is multiplying by its inverse.
namespace ferry::models::launch {
namespace {

constexpr int kThreads = 1024;
constexpr int kVector = 4;

struct Sum {
  __device__ float operator()(float a, float b) const { return __fadd_rn(a, b); }
};
struct Maximum {
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

template <typename Combine>
__device__ float over_block(float value, float none, float* shared, Combine combine) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  for (int distance = kLanes / 2; distance > 0; distance /= 2)
    value = combine(value, __shfl_down_sync(0xffffffffu, value, distance));
  __syncthreads();  // the last result has been read
  if (lane == 0) shared[warp] = value;
  __syncthreads();
  value = lane < kThreads / kLanes ? shared[lane] : none;
  if (warp == 0) {
    for (int distance = kLanes / 2; distance > 0; distance /= 2)
      value = combine(value, __shfl_down_sync(0xffffffffu, value, distance));
    if (lane == 0) shared[0] = value;
  }
  __syncthreads();
  return shared[0];
}

// Visits the elements of a row that are this thread's, in the order of the sum.
template <typename T, typename Visit>
__device__ void visit_row(const T* row, std::int64_t columns, bool aligned, Visit visit) {
  const std::int64_t step = blockDim.x;
  const std::int64_t whole = columns - columns % (kVector * step);
#pragma unroll 4
  for (std::int64_t at = threadIdx.x; at * kVector < whole; at += step) {
    Vector<T, kVector> four;
    if (aligned) {
      four = load<kVector>(row + at * kVector);
    } else {
      for (int i = 0; i < kVector; ++i) four.at[i] = row[at * kVector + i];
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) visit(widen(four.at[i]));
  }
  for (std::int64_t at = whole + threadIdx.x; at < columns; at += step) visit(widen(row[at]));
}

__device__ float scaled(float logit, LogProbShape shape) {
  return __fmul_rn(logit, shape.inverse_temperature);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) statistics_of_rows(const T* logits,
                                                               const std::int64_t* labels,
                                                               float* statistics,
                                                               LogProbShape shape) {
  __shared__ float shared[kThreads / kLanes];
  const std::int64_t index = blockIdx.x;
  const T* row = logits + index * shape.row_stride;
  const bool aligned = is_aligned<T, kVector>(row);
  float most = -FLT_MAX;
  visit_row(row, shape.columns, aligned, [&](float l) { most = fmaxf(most, scaled(l, shape)); });
  const float maximum = over_block(most, -FLT_MAX, shared, Maximum{});
  float sum = 0;
  float weighted = 0;
  visit_row(row, shape.columns, aligned, [&](float l) {
    const float below = __fsub_rn(scaled(l, shape), maximum);
    const float e = ::expf(below);
    sum = __fadd_rn(sum, e);
    weighted += e * below;
  });
  const float total = over_block(sum, 0, shared, Sum{});
  const float below = over_block(weighted, 0, shared, Sum{});
  if (threadIdx.x != 0) return;
  const std::int64_t label = labels[index] - shape.first;
  statistics[index] = maximum;
  statistics[shape.rows + index] = ::logf(total);
  statistics[2 * shape.rows + index] = below / total;
  if (label >= 0 && label < shape.columns)
    statistics[3 * shape.rows + index] = scaled(widen(row[label]), shape);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) gradients_of_rows(T* logits,
                                                              const float* statistics,
                                                              const std::int64_t* labels,
                                                              const float* of_log_prob,
                                                              const float* of_entropy,
                                                              LogProbShape shape) {
  const std::int64_t index = blockIdx.x;
  T* row = logits + index * shape.row_stride;
  const float maximum = statistics[index];
  const float log_sum = statistics[shape.rows + index];
  const float mean = statistics[2 * shape.rows + index];
  const std::int64_t label = labels[index] - shape.first;
  const float log_prob = of_log_prob[index] * shape.inverse_temperature;
  const float entropy = of_entropy == nullptr ? 0 : of_entropy[index] * shape.inverse_temperature;
  const auto gradient = [&](std::int64_t column, T logit) {
    if (column >= shape.columns) return narrow<T>(0);
    const float below = scaled(widen(logit), shape) - maximum;
    const float p = ::expf(below - log_sum);
    const float of_label = column == label ? log_prob : 0;
    return narrow<T>(of_label - log_prob * p + entropy * p * (mean - below));
  };
  if (shape.row_stride % kVector == 0 && is_aligned<T, kVector>(logits)) {
#pragma unroll 2
    for (std::int64_t at = threadIdx.x; at < shape.row_stride / kVector; at += blockDim.x) {
      auto four = load<kVector>(row + at * kVector);
#pragma unroll
      for (int i = 0; i < kVector; ++i) four.at[i] = gradient(at * kVector + i, four.at[i]);
      store(row + at * kVector, four);
    }
  } else {
    for (std::int64_t at = threadIdx.x; at < shape.row_stride; at += blockDim.x)
      row[at] = gradient(at, row[at]);
  }
}

}  // namespace

cudaError_t row_statistics(const void* logits,
                           const std::int64_t* labels,
                           float* statistics,
                           LogProbShape shape,
                           Element element,
                           cudaStream_t stream) {
  return by_element(element, [&](auto* none) {
    using T = std::remove_pointer_t<decltype(none)>;
    statistics_of_rows<<<static_cast<unsigned>(shape.rows), kThreads, 0, stream>>>(
        static_cast<const T*>(logits), labels, statistics, shape);
  });
}

cudaError_t logits_to_gradient(void* logits,
                               const float* statistics,
                               const std::int64_t* labels,
                               const float* of_log_prob,
                               const float* of_entropy,
                               LogProbShape shape,
                               Element element,
                               cudaStream_t stream) {
  return by_element(element, [&](auto* none) {
    using T = std::remove_pointer_t<decltype(none)>;
    gradients_of_rows<<<static_cast<unsigned>(shape.rows), kThreads, 0, stream>>>(
        static_cast<T*>(logits), statistics, labels, of_log_prob, of_entropy, shape);
  });
}

}  // namespace ferry::models::launch
