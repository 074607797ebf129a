#include "models/kernels/cuda/cuda_element.cuh"
#include "models/kernels/cuda/cuda_launch.h"

namespace ferry::models::launch {
namespace {

// Blocks and threads divide rows and columns, never K.
constexpr int kAtOnce = 4;  // numbers of one load

// kAtOnce numbers of a line of k from `at` on, zeros behind its end, and as they are: what used
// them here would wait for each load. kAligned: every line is, to kAtOnce numbers.
template <bool kAligned, typename T>
__device__ Vector<T, kAtOnce> load_numbers(const T* line,
                                           std::int64_t at,
                                           std::int64_t k,
                                           bool exists) {
  Vector<T, kAtOnce> numbers{};
  if constexpr (kAligned) {
    if (exists && at < k) numbers = load<kAtOnce>(line + at);
  } else {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (exists && at + i < k) numbers.at[i] = line[at + i];
  }
  return numbers;
}

struct Product {
  const float* bias = nullptr;
  float* y = nullptr;
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
};

__device__ void finish(const Product& of, std::int64_t row, std::int64_t column, float sum) {
  if (row >= of.m || column >= of.n) return;
  of.y[row * of.n + column] = of.bias == nullptr ? sum : __fadd_rn(sum, of.bias[column]);
}

constexpr int kTile = 64;   // rows and columns of a block
constexpr int kDepth = 16;  // of K at a time
constexpr int kEach = 4;    // rows and columns of a thread
constexpr int kSide = kTile / kEach;
constexpr int kLoadsOfLine = kDepth / kAtOnce;
static_assert(kSide * kSide == kTile * kLoadsOfLine, "a thread loads once of each operand");

// While a part of K is multiplied the next one is on its way.
template <bool kAligned, typename T>
__global__ void __launch_bounds__(kSide* kSide) chain(const T* x, const T* w, Product of) {
  __shared__ __align__(16) float xs[2][kDepth][kTile + kAtOnce];
  __shared__ __align__(16) float ws[2][kDepth][kTile + kAtOnce];
  const std::int64_t row0 = static_cast<std::int64_t>(blockIdx.y) * kTile;
  const std::int64_t column0 = static_cast<std::int64_t>(blockIdx.x) * kTile;
  const int thread = static_cast<int>(threadIdx.x);
  const int tx = thread % kSide;
  const int ty = thread / kSide;
  const int line = thread / kLoadsOfLine;
  const int offset = thread % kLoadsOfLine * kAtOnce;
  const T* const own_row = x + (row0 + line) * of.k;
  const T* const own_column = w + (column0 + line) * of.k;
  const bool has_row = row0 + line < of.m;
  const bool has_column = column0 + line < of.n;
  wait_for_inputs();
  auto of_x = load_numbers<kAligned>(own_row, offset, of.k, has_row);
  auto of_w = load_numbers<kAligned>(own_column, offset, of.k, has_column);
  float sums[kEach][kEach] = {};
  int buffer = 0;
  for (std::int64_t k0 = 0; k0 < of.k; k0 += kDepth) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      xs[buffer][offset + i][line] = widen(of_x.at[i]);
      ws[buffer][offset + i][line] = widen(of_w.at[i]);
    }
    __syncthreads();
    of_x = load_numbers<kAligned>(own_row, k0 + kDepth + offset, of.k, has_row);
    of_w = load_numbers<kAligned>(own_column, k0 + kDepth + offset, of.k, has_column);
    const auto multiply = [&](int at) {
      const float4 rows = *reinterpret_cast<const float4*>(&xs[buffer][at][ty * kEach]);
      const float4 columns = *reinterpret_cast<const float4*>(&ws[buffer][at][tx * kEach]);
      const float a[kEach] = {rows.x, rows.y, rows.z, rows.w};
      const float b[kEach] = {columns.x, columns.y, columns.z, columns.w};
#pragma unroll
      for (int i = 0; i < kEach; ++i)
#pragma unroll
        for (int j = 0; j < kEach; ++j) sums[i][j] = __fmaf_rn(a[i], b[j], sums[i][j]);
    };
    if (k0 + kDepth <= of.k) {
#pragma unroll
      for (int at = 0; at < kDepth; ++at) multiply(at);
    } else {
      for (int at = 0; at < static_cast<int>(of.k - k0); ++at) multiply(at);
    }
    buffer = 1 - buffer;
  }
  release_dependents();
  for (int i = 0; i < kEach; ++i)
    for (int j = 0; j < kEach; ++j)
      finish(of, row0 + ty * kEach + i, column0 + tx * kEach + j, sums[i][j]);
}

// Few rows: a thread adds up one element, whose chain of K additions, four clocks each, takes the
// most of the time. A block has few columns, so that there are many blocks to read the weight.
constexpr int kFewColumns = 8;
constexpr int kRowsOfWarp = kLanes / kFewColumns;
constexpr int kFewWarps = 4;
constexpr int kFewRows = kFewWarps * kRowsOfWarp;  // of a block
constexpr int kFewThreads = kFewWarps * kLanes;
constexpr int kFewDepth = 256;
constexpr int kLoadsOfFewLine = kFewDepth / kAtOnce;
constexpr int kFewPitch = kFewDepth + kAtOnce;  // neighbours are in other banks

// Loads of a thread for a part of K, of `count` lines one behind another.
template <bool kAligned, int kCount, typename T>
__device__ void load_lines(Vector<T, kAtOnce> (&numbers)[kCount],
                           const T* lines,
                           std::int64_t count,
                           std::int64_t k0,
                           std::int64_t k) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int at = static_cast<int>(threadIdx.x) + i * kFewThreads;
    const std::int64_t line = at / kLoadsOfFewLine;
    numbers[i] = load_numbers<kAligned>(lines + line * k, k0 + at % kLoadsOfFewLine * kAtOnce, k,
                                        line < count);
  }
}
template <int kCount, typename T>
__device__ void keep_lines(float (*lines)[kFewPitch], const Vector<T, kAtOnce> (&numbers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int at = static_cast<int>(threadIdx.x) + i * kFewThreads;
    const auto& of = numbers[i].at;
    *reinterpret_cast<float4*>(&lines[at / kLoadsOfFewLine][at % kLoadsOfFewLine * kAtOnce]) = {
        widen(of[0]), widen(of[1]), widen(of[2]), widen(of[3])};
  }
}

template <bool kAligned, typename T>
__global__ void __launch_bounds__(kFewThreads) chain_few(const T* x, const T* w, Product of) {
  __shared__ __align__(16) float xs[kFewRows][kFewPitch];
  __shared__ __align__(16) float ws[kFewColumns][kFewPitch];
  const std::int64_t row0 = static_cast<std::int64_t>(blockIdx.y) * kFewRows;
  const std::int64_t column0 = static_cast<std::int64_t>(blockIdx.x) * kFewColumns;
  const int row = static_cast<int>(threadIdx.x) / kFewColumns;
  const int column = static_cast<int>(threadIdx.x) % kFewColumns;
  const bool has_rows = row0 + row / kRowsOfWarp * kRowsOfWarp < of.m;  // the warp
  Vector<T, kAtOnce> of_x[kFewRows * kLoadsOfFewLine / kFewThreads];
  Vector<T, kAtOnce> of_w[kFewColumns * kLoadsOfFewLine / kFewThreads];
  const auto load_part = [&](std::int64_t k0) {
    load_lines<kAligned>(of_w, w + column0 * of.k, of.n - column0, k0, of.k);
    load_lines<kAligned>(of_x, x + row0 * of.k, of.m - row0, k0, of.k);
  };
  wait_for_inputs();
  load_part(0);
  float sum = 0;
  for (std::int64_t k0 = 0; k0 < of.k; k0 += kFewDepth) {
    __syncthreads();
    keep_lines(xs, of_x);
    keep_lines(ws, of_w);
    __syncthreads();
    load_part(k0 + kFewDepth);
    if (!has_rows) continue;
    const float* const a = xs[row];
    const float* const b = ws[column];
    if (k0 + kFewDepth <= of.k) {
#pragma unroll 16
      for (int at = 0; at < kFewDepth; at += kAtOnce) {
        const auto left = load<kAtOnce>(a + at);
        const auto right = load<kAtOnce>(b + at);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) sum = __fmaf_rn(left.at[i], right.at[i], sum);
      }
    } else {
      for (int at = 0; at < static_cast<int>(of.k - k0); ++at) sum = __fmaf_rn(a[at], b[at], sum);
    }
  }
  release_dependents();
  finish(of, row0 + row, column0 + column, sum);
}

template <bool kAligned, typename T>
cudaError_t run(const T* x, const T* w, const Product& of, cudaStream_t stream) {
  constexpr std::int64_t kFewTiles = 16;  // leave most multiprocessors idle
  const auto blocks = [&](std::int64_t columns, std::int64_t rows) {
    return dim3(static_cast<unsigned>(ceil_div(of.n, columns)),
                static_cast<unsigned>(ceil_div(of.m, rows)));
  };
  if (of.m <= kFewRows || ceil_div(of.n, kTile) * ceil_div(of.m, kTile) < kFewTiles)
    return launch_dependent(chain_few<kAligned, T>, blocks(kFewColumns, kFewRows), kFewThreads, 0,
                            stream, x, w, of);
  return launch_dependent(chain<kAligned, T>, blocks(kTile, kTile), kSide * kSide, 0, stream, x, w,
                          of);
}

}  // namespace

cudaError_t serial_gemm(const void* x,
                        const void* w,
                        const float* bias,
                        float* y,
                        std::int64_t m,
                        std::int64_t n,
                        std::int64_t k,
                        Element element,
                        cudaStream_t stream) {
  return by_element(element, [&](auto* none) {
    using T = std::remove_pointer_t<decltype(none)>;
    const auto* const rows = static_cast<const T*>(x);
    const auto* const lines = static_cast<const T*>(w);
    const Product of{.bias = bias, .y = y, .m = m, .n = n, .k = k};
    if (k % kAtOnce == 0 && is_aligned<T, kAtOnce>(rows) && is_aligned<T, kAtOnce>(lines))
      (void)run<true>(rows, lines, of, stream);
    else
      (void)run<false>(rows, lines, of, stream);
  });
}

}  // namespace ferry::models::launch
