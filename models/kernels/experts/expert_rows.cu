#include "models/kernels/cuda/cuda_element.cuh"
#include "models/kernels/cuda/gated_units.cuh"
#include "models/kernels/cuda/weight_lines.cuh"
#include "models/kernels/experts/expert_launch.h"

namespace ferry::models::launch {
namespace {

constexpr int kWarps = 8;
constexpr int kMostChoices = 512;
constexpr int kMostRows = 8;  // rows that share a reading of the weights
constexpr std::int64_t kSharedBytes = 48 << 10;

// Columns of a warp: gated ones are two lines of weights each.
template <bool kGated>
constexpr int kColumns = kGated ? 2 : 4;
template <bool kGated>
constexpr int kLines = kGated ? 2 * kColumns<kGated> : kColumns<kGated>;

// Multiplies kRows rows, [kRows, in] in shared memory, by this warp's columns of an expert. Lanes
// share out `in` alike for any kRows, so that a row's sums have the same bits beside any others.
template <bool kGated, int kRows>
__device__ void multiply(const Bf16* rows,
                         const Bf16* weights,
                         const Bf16* bias,
                         const int* choices,
                         Bf16* y,
                         const FewRowsShape& shape) {
  const int in = static_cast<int>(shape.in);
  const int columns = static_cast<int>(shape.columns);
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  const int first = (static_cast<int>(blockIdx.x) * kWarps + warp) * kColumns<kGated>;
  if (first >= columns) return;
  const Bf16* lines[kLines<kGated>];
#pragma unroll
  for (int line = 0; line < kLines<kGated>; ++line) {
    const int column = min(first + line % kColumns<kGated>, columns - 1);
    const int half = line / kColumns<kGated>;
    lines[line] = weights + (static_cast<std::int64_t>(half) * columns + column) * in;
  }
  float sums[kLines<kGated>][kRows] = {};
#pragma unroll 4
  for (int at = lane * kWide; at < in; at += kStep) {
    uint4 packed[kLines<kGated>];
#pragma unroll
    for (int line = 0; line < kLines<kGated>; ++line) packed[line] = load_once(lines[line] + at);
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      float x[kWide];
      unpack(*reinterpret_cast<const uint4*>(rows + row * in + at), x);
#pragma unroll
      for (int line = 0; line < kLines<kGated>; ++line) {
        float w[kWide];
        unpack(packed[line], w);
#pragma unroll
        for (int i = 0; i < kWide; ++i) sums[line][row] = __fmaf_rn(x[i], w[i], sums[line][row]);
      }
    }
  }
#pragma unroll
  for (int line = 0; line < kLines<kGated>; ++line)
#pragma unroll
    for (int row = 0; row < kRows; ++row) sums[line][row] = sum_over_lanes(sums[line][row]);
  if (lane != 0) return;
  const auto plus_bias = [bias](float sum, int line) {
    const float product = rounded<Bf16>(sum);
    return bias == nullptr ? product : rounded<Bf16>(__fadd_rn(product, widen(bias[line])));
  };
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
#pragma unroll
    for (int i = 0; i < kColumns<kGated>; ++i) {
      const int column = first + i;
      if (column >= columns) break;
      auto* const result = y + static_cast<std::int64_t>(choices[row]) * columns + column;
      if constexpr (kGated) {
        const float gate = plus_bias(sums[i][row], column);
        const float up = plus_bias(sums[kColumns<kGated> + i][row], columns + column);
        *result =
            narrow<Bf16>(shape.quick ? quick_geglu_of<Bf16>(gate, up, shape.clamp, shape.offset)
                                     : swiglu_of<Bf16>(gate, up));
      } else {
        *result = narrow<Bf16>(plus_bias(sums[i][row], column));
      }
    }
  }
}

// A block computes kWarps * kColumns columns for all choices of one expert: of expert blockIdx.y,
// or, where there are fewer choices than experts, of choice blockIdx.y unless an earlier one has it
// too.
template <bool kGated>
__global__ void __launch_bounds__(kWarps* kLanes, 2) few_rows(const Bf16* x,
                                                              const std::int64_t* choices,
                                                              const Bf16* weights,
                                                              const Bf16* biases,
                                                              Bf16* y,
                                                              FewRowsShape shape,
                                                              int rows_at_once) {
  extern __shared__ __align__(16) Bf16 rows[];
  __shared__ int mine[kMostChoices];
  __shared__ int count;
  const int thread = static_cast<int>(threadIdx.x);
  const int topk = static_cast<int>(shape.choices.topk);
  const int num_choices = static_cast<int>(shape.choices.tokens) * topk;
  const int in = static_cast<int>(shape.in);
  const int columns = static_cast<int>(shape.columns);
  const int block = static_cast<int>(blockIdx.y);
  const bool by_choice = num_choices < static_cast<int>(shape.choices.experts);
  if (thread == 0) count = 0;
  // The kernel before this one has waited for the choices, if it is the gated one: only its results
  // are not there yet, so that the weights may be fetched meanwhile.
  if constexpr (kGated) {
    wait_for_inputs();
    release_dependents();
  }
  const std::int64_t expert = by_choice ? choices[block] : block;
  if constexpr (!kGated) {
    constexpr int kOfBlock = kWarps * kColumns<kGated>;
    const int first = static_cast<int>(blockIdx.x) * kOfBlock;
    const auto* const lines = weights + (expert * shape.columns + first) * shape.in;
    const int numbers = min(kOfBlock, columns - first) * in;
    if (by_choice)
      for (int i = thread * 64; i < numbers; i += kWarps * kLanes * 64) fetch(lines + i);
    release_dependents();
    wait_for_inputs();
  }
  __syncthreads();
  bool served = false;  // by another block
  for (int i = thread; i < num_choices; i += kWarps * kLanes) {
    if (choices[i] != expert) continue;
    served = served || (by_choice && i < block);
    mine[atomicAdd(&count, 1)] = i;
  }
  if (__syncthreads_or(served ? 1 : 0) != 0) return;
  const std::int64_t first_line = expert * (kGated ? 2 : 1) * shape.columns;
  const auto* const of_expert = weights + first_line * shape.in;
  const auto* const bias = biases == nullptr ? nullptr : biases + first_line;
  for (int first = 0; first < count;) {
    const int left = min(count - first, rows_at_once);
    const int taken = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
    const int units = in / kWide;
    for (int i = thread; i < taken * units; i += kWarps * kLanes) {
      const int choice = mine[first + i / units];
      const std::int64_t row = shape.of_tokens ? choice / topk : choice;
      reinterpret_cast<uint4*>(rows)[i] = reinterpret_cast<const uint4*>(x + row * in)[i % units];
    }
    __syncthreads();
    const int* const now = mine + first;
    if (taken == 8)
      multiply<kGated, 8>(rows, of_expert, bias, now, y, shape);
    else if (taken == 4)
      multiply<kGated, 4>(rows, of_expert, bias, now, y, shape);
    else if (taken == 2)
      multiply<kGated, 2>(rows, of_expert, bias, now, y, shape);
    else
      multiply<kGated, 1>(rows, of_expert, bias, now, y, shape);
    first += taken;
    __syncthreads();
  }
}

}  // namespace

bool few_rows_supported(std::int64_t in) {
  return in % kWide == 0 && in * static_cast<std::int64_t>(sizeof(Bf16)) <= kSharedBytes / 2;
}

cudaError_t expert_rows(const void* x,
                        const std::int64_t* choices,
                        const void* weights,
                        const void* biases,
                        void* y,
                        FewRowsShape shape,
                        cudaStream_t stream) {
  const auto num_choices = shape.choices.tokens * shape.choices.topk;
  if (num_choices > kMostChoices || !few_rows_supported(shape.in)) return cudaErrorInvalidValue;
  const auto row_bytes = shape.in * static_cast<std::int64_t>(sizeof(Bf16));
  int rows_at_once = kMostRows;
  // 4 KiB of shared memory are the kernel's own.
  while (rows_at_once > 1 && rows_at_once * row_bytes > kSharedBytes - 4096) rows_at_once /= 2;
  const auto run = [&](auto gated) {
    constexpr bool kGated = decltype(gated)::value;
    constexpr int kOfBlock = kWarps * kColumns<kGated>;
    const dim3 blocks(static_cast<unsigned>(ceil_div(shape.columns, kOfBlock)),
                      static_cast<unsigned>(std::min(num_choices, shape.choices.experts)));
    return launch_dependent(few_rows<kGated>, blocks, kWarps * kLanes,
                            static_cast<std::size_t>(rows_at_once * row_bytes), stream,
                            static_cast<const Bf16*>(x), choices, static_cast<const Bf16*>(weights),
                            static_cast<const Bf16*>(biases), static_cast<Bf16*>(y), shape,
                            rows_at_once);
  };
  return shape.gated ? run(std::true_type{}) : run(std::false_type{});
}

}  // namespace ferry::models::launch
