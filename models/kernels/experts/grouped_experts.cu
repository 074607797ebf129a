#include "models/kernels/cuda/tensor_cores.cuh"
#include "models/kernels/experts/expert_epilogue.cuh"
#include "models/kernels/experts/expert_launch.h"

namespace ferry::models::launch {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kLanes;
constexpr int kLinesOfTile = 16;
constexpr int kLines = 128;  // of a block; a gated product's are as many of gate as of up
constexpr int kHalf = kLines / 2;
constexpr int kChannels = 64;  // of a stage
constexpr int kStages = 3;
constexpr int kUnits = kChannels / kWide;
constexpr int kLineBytes = kChannels * 2;
constexpr int kMostRows = 64;  // that share a reading of the weights
constexpr int kStageBytes = (kLines + kMostRows) * kLineBytes;
constexpr int kSharedBytes = kStages * kStageBytes;
template <bool kGated>
constexpr int kColumns = kGated ? kHalf : kLines;  // of a block
constexpr int kPadding = kWide;  // behind a row of results, so that rows lie in different banks

// The ring has units of 16 bytes, which change places within a line, so that eight lines' units
// lie in different banks. Lines whose numbers are equal modulo 8 are a multiple of kLineBytes
// apart, and the units of the next step an exclusive or.
__device__ int place(int line, int unit) {
  return line * kLineBytes + (unit ^ line % kUnits) * 16;
}
constexpr int kStepBytes = 32;  // of a line's 16 channels

struct Block {
  const Bf16* x;
  const std::int64_t* order;  // or null
  int topk;
  const Bf16* weights;  // of the expert
  const Bf16* biases;   // of the expert, or null
  Bf16* y;
  int first;        // column of the result
  int columns, in;  // of the result, of x
};

// kRows rows, from row `begin` of x on, of which `count` exist, one at least. A warp has a tile of
// each half of the lines.
template <bool kGated, int kRows>
__device__ void multiply(
    const Block& block, unsigned char* shared, int begin, int count, const GroupedShape& shape) {
  constexpr int kTiles = 2;
  static_assert(kTiles * kWarps * kLinesOfTile == kLines);
  constexpr int kPairs = kRows / 16;
  constexpr int kLinesAtOnce = kThreads / kUnits;
  constexpr int kLinesOfThread = kLines / kLinesAtOnce;
  constexpr int kRowsOfThread = kRows / kLinesAtOnce;
  constexpr int kSteps = kChannels / 16;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kLanes;
  const int unit = thread % kUnits;
  const int in = block.in;
  const auto ring = shared_address(shared);
  const int first_line = thread / kLanes * kLinesOfTile;

  const int copied = place(thread / kUnits, unit);
  const int read_lines = place(first_line + lane % 16, lane / 16);
  const int read_rows = kLines * kLineBytes + place(lane / 16 * 8 + lane % 8, lane / 8 % 2);
  unsigned lines[kLinesOfThread];  // where they begin, in an expert's weights
  const Bf16* rows[kRowsOfThread];
#pragma unroll
  for (int i = 0; i < kLinesOfThread; ++i) {
    const int line = thread / kUnits + i * kLinesAtOnce;
    const int column =
        kGated ? line / kHalf * block.columns + min(block.first + line % kHalf, block.columns - 1)
               : min(block.first + line, block.columns - 1);
    lines[i] = static_cast<unsigned>(column * in + unit * kWide);
  }
#pragma unroll
  for (int i = 0; i < kRowsOfThread; ++i) {
    const int row = begin + min(thread / kUnits + i * kLinesAtOnce, count - 1);
    const std::int64_t of_x = block.order == nullptr ? row : block.order[row] / block.topk;
    rows[i] = block.x + of_x * in + unit * kWide;
  }
  const int chunks = in / kChannels;
  const auto copy = [&](int chunk) {
    if (chunk < chunks) {
      const auto stage = ring + chunk % kStages * kStageBytes + copied;
      const auto* const weights = block.weights + chunk * kChannels;
#pragma unroll
      for (int i = 0; i < kLinesOfThread; ++i)
        copy_async(stage + i * kLinesAtOnce * kLineBytes, weights + lines[i]);
#pragma unroll
      for (int i = 0; i < kRowsOfThread; ++i)
        copy_async(stage + (kLines + i * kLinesAtOnce) * kLineBytes, rows[i] + chunk * kChannels);
    }
    commit_copies();
  };

  for (int chunk = 0; chunk < kStages - 1; ++chunk) copy(chunk);
  float sums[kTiles][2 * kPairs][4] = {};
  for (int chunk = 0; chunk < chunks; ++chunk) {
    wait_for_all_but<kStages - 2>();
    __syncthreads();  // the stage before this one has been read
    copy(chunk + kStages - 1);
    const auto stage = ring + chunk % kStages * kStageBytes;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      Fragment of_lines[kTiles];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
        load_matrices(of_lines[tile],
                      ((stage + read_lines) ^ step * kStepBytes) + tile * kHalf * kLineBytes);
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        Fragment two;
        load_matrices(two, ((stage + read_rows) ^ step * kStepBytes) + pair * 16 * kLineBytes);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          multiply_add(sums[tile][2 * pair], of_lines[tile], two[0], two[1]);
          multiply_add(sums[tile][2 * pair + 1], of_lines[tile], two[2], two[3]);
        }
      }
    }
  }
  wait_for_all_but<0>();
  __syncthreads();

  // Results pass through shared memory, to be written a row's neighbours at once.
  constexpr int kPitch = kColumns<kGated> + kPadding;
  static_assert(kRows * kPitch * 2 <= kSharedBytes);
  auto* const results = reinterpret_cast<Bf16*>(shared);
  const auto with_bias = [&](float sum, int line) {
    return plus_bias(sum, block.biases == nullptr ? nullptr : block.biases + line);
  };
#pragma unroll
  for (int tile = 0; tile < (kGated ? 1 : kTiles); ++tile)
#pragma unroll
    for (int eight = 0; eight < 2 * kPairs; ++eight)
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const int column = tile * kHalf + first_line + lane / 4 + q / 2 * 8;
        const int row = eight * 8 + lane % 4 * 2 + q % 2;
        const int line = min(block.first + column, block.columns - 1);
        float result = with_bias(sums[tile][eight][q], line);
        if constexpr (kGated) {
          const float up = with_bias(sums[1][eight][q], block.columns + line);
          result = gated(result, up, shape.activation);
        }
        results[row * kPitch + column] = narrow<Bf16>(result);
      }
  __syncthreads();
  constexpr int kUnitsOfRow = kColumns<kGated> / kWide;
  for (int i = thread; i < count * kUnitsOfRow; i += kThreads) {
    const int row = i / kUnitsOfRow;
    const int column = i % kUnitsOfRow * kWide;
    if (block.first + column >= block.columns) continue;
    *reinterpret_cast<uint4*>(block.y + static_cast<std::int64_t>(begin + row) * block.columns +
                              block.first + column) =
        *reinterpret_cast<const uint4*>(results + row * kPitch + column);
  }
  __syncthreads();
}

// A block computes some columns for all rows of expert blockIdx.y.
template <bool kGated>
__global__ void __launch_bounds__(kThreads, 3) grouped_experts(const Bf16* x,
                                                               const std::int64_t* order,
                                                               const std::int32_t* ends,
                                                               const Bf16* weights,
                                                               const Bf16* biases,
                                                               Bf16* y,
                                                               GroupedShape shape) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int expert = static_cast<int>(blockIdx.y);
  const std::int64_t first_line = expert * (kGated ? 2 : 1) * shape.columns;
  wait_for_inputs();
  const Block block{.x = x,
                    .order = order,
                    .topk = static_cast<int>(shape.topk),
                    .weights = weights + first_line * shape.in,
                    .biases = biases == nullptr ? nullptr : biases + first_line,
                    .y = y,
                    .first = static_cast<int>(blockIdx.x) * kColumns<kGated>,
                    .columns = static_cast<int>(shape.columns),
                    .in = static_cast<int>(shape.in)};
  int begin = expert == 0 ? 0 : ends[expert - 1];
  const int end = ends[expert];
  while (begin < end) {
    const int count = min(end - begin, kMostRows);
    if (count <= 16)
      multiply<kGated, 16>(block, shared, begin, count, shape);
    else if (count <= 32)
      multiply<kGated, 32>(block, shared, begin, count, shape);
    else
      multiply<kGated, kMostRows>(block, shared, begin, count, shape);
    begin += count;
  }
  release_dependents();
}

}  // namespace

bool grouped_experts_supported(const GroupedShape& shape) {
  constexpr std::int64_t kMostNumbers = std::int64_t{1} << 31;  // of an expert
  return shape.in % kChannels == 0 && shape.columns % kWide == 0 &&
         (shape.gated ? 2 : 1) * shape.columns * shape.in < kMostNumbers;
}

cudaError_t grouped_expert_rows(const void* x,
                                const std::int64_t* order,
                                const std::int32_t* ends,
                                const void* weights,
                                const void* biases,
                                void* y,
                                GroupedShape shape,
                                cudaStream_t stream) {
  if (!grouped_experts_supported(shape)) return cudaErrorInvalidValue;
  const auto run = [&](auto gated) {
    constexpr bool kGated = decltype(gated)::value;
    const dim3 blocks(static_cast<unsigned>(ceil_div(shape.columns, kColumns<kGated>)),
                      static_cast<unsigned>(shape.experts));
    return launch_dependent(grouped_experts<kGated>, blocks, kThreads, kSharedBytes, stream,
                            static_cast<const Bf16*>(x), order, ends,
                            static_cast<const Bf16*>(weights), static_cast<const Bf16*>(biases),
                            static_cast<Bf16*>(y), shape);
  };
  return shape.gated ? run(std::true_type{}) : run(std::false_type{});
}

}  // namespace ferry::models::launch
