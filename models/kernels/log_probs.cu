#include <cooperative_groups.h>

#include <cfloat>
#include <cmath>

#include "models/kernels/cuda/cuda_element.cuh"

// The sum of a row is that of ATen's log_softmax for more than 12,288 columns (ATen/native/cuda/
// SoftMax.cu, cunn_SoftMaxForward with a row that begins at a multiple of 16 bytes): 1024 threads
// read four neighbours at a time and add one after another, the rest of the row one by one; then
// the lanes of a warp by halves, from the largest distance down, then the warps in the same way.
// And as ATen does it, dividing by a number is multiplying by its inverse.
namespace ferry::models::launch {
namespace {

constexpr int kThreads = 1024;
constexpr int kVector = 4;
constexpr int kWarps = kThreads / kLanes;
constexpr std::int64_t kFewRows = 132;  // a multiprocessor for each
constexpr int kBlocksOfFew = 8;         // the most of a cluster that every GPU has
static_assert(kWarps == kLanes);

struct Sum {
  __device__ float operator()(float a, float b) const { return __fadd_rn(a, b); }
};
struct Maximum {
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

template <typename Combine>
__device__ float over_lanes(float value, Combine combine) {
  for (int distance = kLanes / 2; distance > 0; distance /= 2)
    value = combine(value, __shfl_down_sync(0xffffffffu, value, distance));
  return __shfl_sync(0xffffffffu, value, 0);
}

// The threads of a row: those of one thread block, or of the kBlocks of a cluster, so that few rows
// keep more than as many multiprocessors busy. The terms of a sum and their order are the same.
template <int kBlocks>
struct RowThreads {
  static constexpr int kOfBlock = kThreads / kBlocks;
  static_assert(kOfBlock % kLanes == 0 && kBlocks <= kLanes);

  static __device__ int block() {
    return kBlocks == 1 ? 0 : static_cast<int>(cooperative_groups::this_cluster().block_rank());
  }
  static __device__ int thread() { return block() * kOfBlock + static_cast<int>(threadIdx.x); }

  // Waits for all blocks. Called before the first give().
  static __device__ void begin() {
    if constexpr (kBlocks > 1) cooperative_groups::this_cluster().sync();
  }
  // `of_warps` [kWarps] of all blocks gets the value of this warp.
  static __device__ void give(float* of_warps, float value) {
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    if (lane >= kBlocks) return;
    float* const there = kBlocks == 1
                             ? of_warps
                             : cooperative_groups::this_cluster().map_shared_rank(of_warps, lane);
    there[thread() / kLanes] = value;
  }
  // Waits until the values of all give() calls have arrived.
  static __device__ void meet() {
    if constexpr (kBlocks > 1) {
      cooperative_groups::this_cluster().sync();
    } else {
      __syncthreads();
    }
  }
};

// Visits the elements of a row that are the thread's, in the order of the sum. kAhead reads are
// under way at a time.
template <int kAhead, typename T, typename Visit>
__device__ void visit_row(
    const T* row, std::int64_t columns, int thread, bool aligned, Visit visit) {
  const int steps = static_cast<int>(columns / (kVector * kThreads));
  const T* const mine = row + thread * kVector;
  for (int first = 0; first < steps; first += kAhead) {
    Vector<T, kVector> fours[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i >= steps) continue;
      const T* const four = mine + static_cast<std::int64_t>(first + i) * (kVector * kThreads);
      if (aligned) {
        fours[i] = load<kVector>(four);
      } else {
        for (int j = 0; j < kVector; ++j) fours[i].at[j] = four[j];
      }
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i >= steps) continue;
#pragma unroll
      for (int j = 0; j < kVector; ++j) visit(widen(fours[i].at[j]));
    }
  }
  for (std::int64_t at = std::int64_t{steps} * (kVector * kThreads) + thread; at < columns;
       at += kThreads)
    visit(widen(row[at]));
}

__device__ float scaled(float logit, LogProbShape shape) {
  return __fmul_rn(logit, shape.inverse_temperature);
}

template <typename T, int kBlocks>
__global__ void __launch_bounds__(kThreads / kBlocks, 2)
    statistics_of_rows(const T* logits,
                       const std::int64_t* labels,
                       float* statistics,
                       float* log_probs,
                       LogProbShape shape) {
  using Threads = RowThreads<kBlocks>;
  __shared__ float maxima[kWarps];
  __shared__ float sums[kWarps];
  __shared__ float weighted_sums[kWarps];
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int thread = Threads::thread();
  const std::int64_t index = blockIdx.x / kBlocks;
  const T* row = logits + index * shape.row_stride;
  const bool aligned = is_aligned<T, kVector>(row);
  constexpr int kAhead = kBlocks == 1 ? 2 : 16;
  float most = -FLT_MAX;
  visit_row<kAhead>(row, shape.columns, thread, aligned,
                    [&](float l) { most = fmaxf(most, scaled(l, shape)); });
  Threads::begin();
  Threads::give(maxima, over_lanes(most, Maximum{}));
  Threads::meet();
  const float maximum = over_lanes(maxima[lane], Maximum{});
  float sum = 0;
  float weighted = 0;
  visit_row<kAhead>(row, shape.columns, thread, aligned, [&](float l) {
    const float below = __fsub_rn(scaled(l, shape), maximum);
    const float e = ::expf(below);
    sum = __fadd_rn(sum, e);
    weighted += e * below;
  });
  Threads::give(sums, over_lanes(sum, Sum{}));
  Threads::give(weighted_sums, over_lanes(weighted, Sum{}));
  Threads::meet();
  if (thread >= kLanes) return;
  const float total = over_lanes(sums[lane], Sum{});
  const float below = over_lanes(weighted_sums[lane], Sum{});
  if (thread != 0) return;
  const std::int64_t label = labels[index] - shape.first;
  const bool here = label >= 0 && label < shape.columns;
  const float of_label = here ? scaled(widen(row[label]), shape) : -INFINITY;
  const float log_sum = ::logf(total);
  statistics[index] = maximum;
  statistics[shape.rows + index] = log_sum;
  statistics[2 * shape.rows + index] = below / total;
  statistics[3 * shape.rows + index] = of_label;
  log_probs[index] = __fsub_rn(__fsub_rn(of_label, maximum), log_sum);
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
                           float* log_probs,
                           LogProbShape shape,
                           Element element,
                           cudaStream_t stream) {
  const bool few = shape.rows < kFewRows;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {.x = kBlocksOfFew, .y = 1, .z = 1};
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(few ? shape.rows * kBlocksOfFew : shape.rows);
  config.blockDim = few ? kThreads / kBlocksOfFew : kThreads;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = few ? 1 : 0;
  cudaError_t launched = cudaSuccess;
  const auto status = by_element(element, [&](auto* none) {
    using T = std::remove_pointer_t<decltype(none)>;
    const auto kernel = few ? statistics_of_rows<T, kBlocksOfFew> : statistics_of_rows<T, 1>;
    launched = cudaLaunchKernelEx(&config, kernel, static_cast<const T*>(logits), labels,
                                  statistics, log_probs, shape);
  });
  return launched != cudaSuccess ? launched : status;
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
