#include "models/kernels/cuda_element.cuh"

// Each weight is read once, by whole lines, as much of it at a time as hides the memory's latency.
// A thread block has rows of the weight for itself, as many as all others; a warp takes a row, or,
// where rows are few, a part of one, of which the sums are added in order. What is read first does
// not wait for the kernel before.
namespace ferry::models::launch {
namespace {

using Bf16 = __nv_bfloat16;

constexpr int kLanes = 32;
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kLanes;
constexpr int kVector = 8;               // of 16 bytes
constexpr int kStep = kLanes * kVector;  // of a row, that a warp reads at once
constexpr int kAhead = 6;                // steps of a warp that are on their way
constexpr int kBlocks = 3 * 132;
constexpr int kMostRows = 1024;  // of a block

// Read once: not kept in the first cache.
__device__ Vector<Bf16, kVector> stream(const Bf16* x) {
  const auto raw = __ldcs(reinterpret_cast<const uint4*>(x));
  return reinterpret_cast<const Vector<Bf16, kVector>&>(raw);
}

// The steps of a warp: items of its block, each a part of a row, one step after another.
struct Cursor {
  int item;
  int column;
  int end;  // of the part
  const Bf16* row;

  __device__ void begin(const Bf16* weight, int k, int parts, int first_item) {
    item = first_item;
    enter(weight, k, parts);
  }
  __device__ void enter(const Bf16* weight, int k, int parts) {
    const int steps = (k + kStep - 1) / kStep;
    const int part = item % parts;
    column = steps * part / parts * kStep;
    end = min(steps * (part + 1) / parts * kStep, k);
    row = weight + static_cast<std::int64_t>(item / parts) * k;
  }
  // Returns whether that was the end of an item.
  __device__ bool next(const Bf16* weight, int k, int parts) {
    column += kStep;
    if (column < end) return false;
    item += kWarps;
    enter(weight, k, parts);
    return true;
  }
};

template <int kM>
__global__ __launch_bounds__(kThreads, 3) void multiply(const Bf16* __restrict__ x,
                                                        const Bf16* __restrict__ weight,
                                                        const Bf16* __restrict__ bias,
                                                        Bf16* __restrict__ y,
                                                        GemvShape shape,
                                                        int rows_of_block,
                                                        int parts) {
  extern __shared__ float sums[];  // [items, kM]
  release_dependents();
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const std::int64_t first_row = static_cast<std::int64_t>(blockIdx.x) * rows_of_block;
  const int rows =
      static_cast<int>(min(static_cast<std::int64_t>(rows_of_block), shape.n - first_row));
  const int items = rows * parts;
  const int k = static_cast<int>(shape.k);
  const auto* const mine = weight + first_row * shape.k;

  Vector<Bf16, kVector> ahead[kAhead];
  Cursor read{};
  read.begin(mine, k, parts, warp);
  const auto fetch = [&](Vector<Bf16, kVector>& to) {
    const int c = read.column + lane * kVector;
    if (read.item < items && c < k) to = stream(read.row + c);
    read.next(mine, k, parts);
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) fetch(ahead[i]);
  wait_for_inputs();

  Cursor use{};
  use.begin(mine, k, parts, warp);
  float sum[kM] = {};
  while (use.item < items) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (use.item >= items) break;
      const int c = use.column + lane * kVector;
      if (c < k) {
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          const auto in = load<kVector>(x + m * shape.k + c);
#pragma unroll
          for (int j = 0; j < kVector; ++j)
            sum[m] = fmaf(widen(in.at[j]), widen(ahead[i].at[j]), sum[m]);
        }
      }
      fetch(ahead[i]);
      const int item = use.item;
      if (!use.next(mine, k, parts)) continue;
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        for (int distance = kLanes / 2; distance > 0; distance /= 2)
          sum[m] += __shfl_xor_sync(0xffffffffu, sum[m], distance);
        if (lane == 0) sums[item * kM + m] = sum[m];
        sum[m] = 0;
      }
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < rows * kM; i += kThreads) {
    const int row = i / kM;
    const int m = i % kM;
    float total = 0;
    for (int part = 0; part < parts; ++part) total += sums[(row * parts + part) * kM + m];
    if (bias != nullptr) total += widen(bias[first_row + row]);
    y[m * shape.n + first_row + row] = narrow<Bf16>(total);
  }
}

}  // namespace

cudaError_t gemv(const void* x,
                 const void* weight,
                 const void* bias,
                 void* y,
                 GemvShape shape,
                 cudaStream_t stream) {
  if (shape.m < 1 || shape.m > 4) return cudaErrorInvalidValue;
  const auto rows = std::min<std::int64_t>((shape.n + kBlocks - 1) / kBlocks, kMostRows);
  const auto steps = static_cast<int>((shape.k + kStep - 1) / kStep);
  const int parts =
      rows >= 2 * kWarps ? 1 : std::min<int>(steps, 2 * kWarps / static_cast<int>(rows));
  const auto run = [&](auto m) {
    constexpr int kM = decltype(m)::value;
    return launch_dependent(multiply<kM>, static_cast<unsigned>((shape.n + rows - 1) / rows),
                            kThreads, static_cast<std::size_t>(rows * parts * kM) * sizeof(float),
                            stream, static_cast<const Bf16*>(x), static_cast<const Bf16*>(weight),
                            static_cast<const Bf16*>(bias), static_cast<Bf16*>(y), shape,
                            static_cast<int>(rows), parts);
  };
  switch (shape.m) {
    case 1:
      return run(std::integral_constant<int, 1>{});
    case 2:
      return run(std::integral_constant<int, 2>{});
    case 3:
      return run(std::integral_constant<int, 3>{});
    default:
      return run(std::integral_constant<int, 4>{});
  }
}

}  // namespace ferry::models::launch
