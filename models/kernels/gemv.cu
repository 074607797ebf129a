#include "models/kernels/cuda_element.cuh"

// Each weight is read once, by whole lines, as much of it at a time as hides the memory's latency.
// A thread block has rows of the weight for itself, as many as all others, and its warps share them
// out in pieces of a row, whose sums are added in their order: so all multiprocessors have the same
// to read. What is read first does not wait for the kernel before.
namespace ferry::models::launch {
namespace {

using Bf16 = __nv_bfloat16;

constexpr int kLanes = 32;
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kLanes;
constexpr int kVector = 8;   // of 16 bytes
constexpr int kVectors = 2;  // of a lane in a piece
constexpr int kPiece = kVectors * kLanes * kVector;
constexpr int kAhead = 3;  // pieces of a warp that are on their way
constexpr int kBlocks = 3 * 132;
constexpr std::int64_t kMostSums = 8192;  // of a block, in shared memory

// Read once: not kept in the first cache.
__device__ Vector<Bf16, kVector> stream(const Bf16* x) {
  const auto raw = __ldcs(reinterpret_cast<const uint4*>(x));
  return reinterpret_cast<const Vector<Bf16, kVector>&>(raw);
}

template <int kM>
__global__ __launch_bounds__(kThreads, 3) void multiply(const Bf16* __restrict__ x,
                                                        const Bf16* __restrict__ weight,
                                                        const Bf16* __restrict__ bias,
                                                        Bf16* __restrict__ y,
                                                        GemvShape shape,
                                                        int rows_of_block) {
  extern __shared__ float sums[];  // [units, kM]
  release_dependents();
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const std::int64_t first_row = static_cast<std::int64_t>(blockIdx.x) * rows_of_block;
  const int rows =
      static_cast<int>(min(static_cast<std::int64_t>(rows_of_block), shape.n - first_row));
  const int pieces = static_cast<int>((shape.k + kPiece - 1) / kPiece);
  const int units = rows * pieces;
  const auto* const mine = weight + first_row * shape.k;
  const int k = static_cast<int>(shape.k);

  struct Piece {
    Vector<Bf16, kVector> at[kVectors];
  };
  Piece ahead[kAhead];
  const auto column_of = [&](int unit, int vector) {
    return unit % pieces * kPiece + (vector * kLanes + lane) * kVector;
  };
  const auto fetch = [&](int unit, Piece& piece) {
    if (unit >= units) return;
    const auto* const row = mine + static_cast<std::int64_t>(unit / pieces) * shape.k;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int c = column_of(unit, v);
      if (c < k) piece.at[v] = stream(row + c);
    }
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) fetch(warp + i * kWarps, ahead[i]);
  wait_for_inputs();

  for (int base = warp; base < units; base += kAhead * kWarps) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int unit = base + i * kWarps;
      if (unit >= units) break;
      float sum[kM] = {};
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int c = column_of(unit, v);
        if (c >= k) continue;
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          const auto in = load<kVector>(x + m * shape.k + c);
#pragma unroll
          for (int j = 0; j < kVector; ++j)
            sum[m] = fmaf(widen(in.at[j]), widen(ahead[i].at[v].at[j]), sum[m]);
        }
      }
      fetch(unit + kAhead * kWarps, ahead[i]);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        for (int distance = kLanes / 2; distance > 0; distance /= 2)
          sum[m] += __shfl_xor_sync(0xffffffffu, sum[m], distance);
        if (lane == 0) sums[unit * kM + m] = sum[m];
      }
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < rows * kM; i += kThreads) {
    const int row = i / kM;
    const int m = i % kM;
    float sum = 0;
    for (int piece = 0; piece < pieces; ++piece) sum += sums[(row * pieces + piece) * kM + m];
    if (bias != nullptr) sum += widen(bias[first_row + row]);
    y[m * shape.n + first_row + row] = narrow<Bf16>(sum);
  }
}

}  // namespace

cudaError_t gemv(const void* x,
                 const void* weight,
                 const void* bias,
                 void* y,
                 GemvShape shape,
                 cudaStream_t stream) {
  const std::int64_t pieces = (shape.k + kPiece - 1) / kPiece;
  if (shape.m < 1 || shape.m > 4 || pieces * shape.m > kMostSums) return cudaErrorInvalidValue;
  const std::int64_t rows =
      std::min((shape.n + kBlocks - 1) / kBlocks, kMostSums / (pieces * shape.m));
  const auto run = [&](auto m) {
    constexpr int kM = decltype(m)::value;
    return launch_dependent(multiply<kM>, static_cast<unsigned>((shape.n + rows - 1) / rows),
                            kThreads, static_cast<std::size_t>(rows * pieces * kM) * sizeof(float),
                            stream, static_cast<const Bf16*>(x), static_cast<const Bf16*>(weight),
                            static_cast<const Bf16*>(bias), static_cast<Bf16*>(y), shape,
                            static_cast<int>(rows));
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
