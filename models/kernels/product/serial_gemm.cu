#include "models/kernels/cuda/cuda_element.cuh"
#include "models/kernels/cuda/cuda_launch.h"
#include "models/kernels/cuda/weight_lines.cuh"

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
// most of the time. A block has few columns, so that there are many blocks to read the weight, and
// a ring of parts of K, so that the next ones are on their way while it adds up.
constexpr int kFewColumns = 8;
constexpr int kRowsOfWarp = kLanes / kFewColumns;
constexpr int kFewWarps = 4;
constexpr int kFewRows = kFewWarps * kRowsOfWarp;  // of a block
constexpr int kFewThreads = kFewWarps * kLanes;
constexpr int kFewDepth = 128;  // of a part
constexpr int kFewLines = kFewColumns + kFewRows;

template <typename T>
struct Part {
  static constexpr int kUnit = 16 / static_cast<int>(sizeof(T));  // numbers of a copy
  static constexpr int kUnits = kFewDepth / kUnit;                // of a line
  static constexpr int kStages = sizeof(T) == 2 ? 5 : 3;
  // Columns, then rows; neighbours begin in other banks.
  alignas(16) T lines[kFewLines][kFewDepth + kUnit];
};

__device__ void load_unit(const float* from, float (&to)[4]) {
  const auto numbers = load<4>(from);
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = numbers.at[i];
}
__device__ void load_unit(const Bf16* from, float (&to)[kWide]) {
  unpack(*reinterpret_cast<const uint4*>(from), to);
}

// x and w are aligned to 16 bytes, and so are their lines.
template <typename T>
__global__ void __launch_bounds__(kFewThreads) chain_few(const T* x, const T* w, Product of) {
  using Ring = Part<T>;
  __shared__ Ring ring[Ring::kStages];
  const std::int64_t row0 = static_cast<std::int64_t>(blockIdx.y) * kFewRows;
  const std::int64_t column0 = static_cast<std::int64_t>(blockIdx.x) * kFewColumns;
  const int thread = static_cast<int>(threadIdx.x);
  const int row = thread / kFewColumns;
  const int column = thread % kFewColumns;
  const bool has_rows = row0 + row / kRowsOfWarp * kRowsOfWarp < of.m;  // the warp
  const int parts = static_cast<int>(ceil_div(of.k, kFewDepth));
  const auto copy = [&](int part) {  // zeros for what is not there
#pragma unroll
    for (int i = 0; i < ceil_div(kFewLines * Ring::kUnits, kFewThreads); ++i) {
      const int unit = thread + i * kFewThreads;
      const int line = unit / Ring::kUnits;
      if (line >= kFewLines) break;
      const int within = unit % Ring::kUnits * Ring::kUnit;
      const std::int64_t at = static_cast<std::int64_t>(part) * kFewDepth + within;
      const bool is_column = line < kFewColumns;
      const std::int64_t number = is_column ? column0 + line : row0 + line - kFewColumns;
      const bool exists = at < of.k && number < (is_column ? of.n : of.m);
      const T* const from = (is_column ? w : x) + (exists ? number * of.k + at : 0);
      const int bytes = exists ? 16 : 0;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                       shared_address(&ring[part % Ring::kStages].lines[line][within])),
                   "l"(from), "r"(bytes)
                   : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  wait_for_inputs();
  for (int part = 0; part < Ring::kStages - 1; ++part) copy(part);
  float sum = 0;
  for (int part = 0; part < parts; ++part) {
    asm volatile("cp.async.wait_group %0;" ::"n"(Ring::kStages - 2) : "memory");
    __syncthreads();  // the part is here, and all have read the one whose place is taken now
    copy(part + Ring::kStages - 1);
    if (!has_rows) continue;
    const auto& lines = ring[part % Ring::kStages].lines;
    const T* const a = lines[kFewColumns + row];
    const T* const b = lines[column];
    const std::int64_t left = of.k - static_cast<std::int64_t>(part) * kFewDepth;
    if (left >= kFewDepth) {
#pragma unroll
      for (int at = 0; at < kFewDepth; at += Ring::kUnit) {
        float of_row[Ring::kUnit];
        float of_column[Ring::kUnit];
        load_unit(a + at, of_row);
        load_unit(b + at, of_column);
#pragma unroll
        for (int i = 0; i < Ring::kUnit; ++i) sum = __fmaf_rn(of_row[i], of_column[i], sum);
      }
    } else {
      for (int at = 0; at < static_cast<int>(left); ++at)
        sum = __fmaf_rn(widen(a[at]), widen(b[at]), sum);
    }
  }
  release_dependents();
  finish(of, row0 + row, column0 + column, sum);
}

// The number of tiles from which on tiles are faster (tests/bench/kernels/product_bench.cc).
constexpr std::int64_t kManyTiles = 80;

template <typename T>
cudaError_t run(const T* x, const T* w, const Product& of, cudaStream_t stream) {
  const auto blocks = [&](std::int64_t columns, std::int64_t rows) {
    return dim3(static_cast<unsigned>(ceil_div(of.n, columns)),
                static_cast<unsigned>(ceil_div(of.m, rows)));
  };
  const auto aligned = [&](auto count) {
    constexpr int kCount = decltype(count)::value;
    return of.k % kCount == 0 && is_aligned<T, kCount>(x) && is_aligned<T, kCount>(w);
  };
  const bool few = of.m <= kFewRows || ceil_div(of.n, kTile) * ceil_div(of.m, kTile) < kManyTiles;
  if (few && aligned(std::integral_constant<int, Part<T>::kUnit>{}))
    return launch_dependent(chain_few<T>, blocks(kFewColumns, kFewRows), kFewThreads, 0, stream, x,
                            w, of);
  const auto tiles = [&](auto* kernel) {
    return launch_dependent(kernel, blocks(kTile, kTile), kSide * kSide, 0, stream, x, w, of);
  };
  return aligned(std::integral_constant<int, kAtOnce>{}) ? tiles(chain<true, T>)
                                                         : tiles(chain<false, T>);
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
    (void)run(static_cast<const T*>(x), static_cast<const T*>(w),
              Product{.bias = bias, .y = y, .m = m, .n = n, .k = k}, stream);
  });
}

}  // namespace ferry::models::launch
