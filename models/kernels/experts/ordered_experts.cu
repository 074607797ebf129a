#include "models/kernels/cuda/ordered_columns.cuh"
#include "models/kernels/experts/expert_epilogue.cuh"
#include "models/kernels/experts/expert_launch.h"

namespace ferry::models::launch {
namespace {

using GatedColumns = OrderedColumns<2, 9>;
constexpr int kMostTokens = kOrderedRows;

// The gated half of a choice's expert, blockIdx.y is the choice, for all tokens that have it,
// unless an earlier one has it, too. A block of one warp computes 16 columns.
__global__ void __launch_bounds__(kLanes) ordered_gated(const Bf16* x,
                                                        const std::int64_t* choices,
                                                        const Bf16* weights,
                                                        const Bf16* biases,
                                                        Bf16* y,
                                                        FewRowsShape shape) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ int mine[kMostTokens];
  const int lane = static_cast<int>(threadIdx.x);
  const int topk = static_cast<int>(shape.choices.topk);
  const int num_choices = static_cast<int>(shape.choices.tokens) * topk;
  const int in = static_cast<int>(shape.in);
  const int columns = static_cast<int>(shape.columns);
  const int block = static_cast<int>(blockIdx.y);
  wait_for_inputs();
  const std::int64_t expert = choices[block];
  int count = 0;
  bool served = false;  // by another block
  for (int first = 0; first < num_choices; first += kLanes) {
    const int choice = first + lane;
    const bool is_mine = choice < num_choices && choices[choice] == expert;
    const auto all = __ballot_sync(kAllLanes, is_mine);
    const int at = count + __popc(all & ((1U << lane) - 1));
    if (is_mine && at < kMostTokens) mine[at] = choice;
    served = served || (is_mine && choice < block);
    count = min(count + __popc(all), kMostTokens);
  }
  __syncwarp();
  if (__any_sync(kAllLanes, served)) return;
  const int first = static_cast<int>(blockIdx.x) * kOrderedLines;
  const std::int64_t first_line = expert * 2 * columns;
  const auto* const of_expert = weights + (first_line + first) * in;
  const Bf16* const tiles[] = {of_expert, of_expert + static_cast<std::int64_t>(columns) * in};
  GatedColumns ordered(shared, tiles, columns - first, in);
  ordered.begin();
  const Bf16* rows[GatedColumns::kRowsOfLane];
#pragma unroll
  for (int i = 0; i < GatedColumns::kRowsOfLane; ++i) {
    const int at = GatedColumns::row_of_lane(i);
    rows[i] = at < count ? x + static_cast<std::int64_t>(mine[at] / topk) * in : nullptr;
  }
  float sums[2][4] = {};
  ordered.multiply(rows, sums);
  release_dependents();
  const auto with_bias = [&](float sum, int line) {
    return plus_bias(sum, biases == nullptr ? nullptr : biases + first_line + line);
  };
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const int column = first + GatedColumns::line_of(q);
    const int at = GatedColumns::row_of(q);
    if (column >= columns || at >= count) continue;
    y[static_cast<std::int64_t>(mine[at]) * columns + column] = narrow<Bf16>(gated(
        with_bias(sums[0][q], column), with_bias(sums[1][q], columns + column), shape.activation));
  }
}

// A token's results of all its experts, and their weighed sum: a warp has 16 columns of one choice.
using CombinedColumns = OrderedColumns<1, 6>;
constexpr int kMostCombined = 12;  // choices of a token, for which a multiprocessor has room

template <typename W>
__global__ void __launch_bounds__(kMostCombined* kLanes)
    ordered_combined(const Bf16* x,
                     const std::int64_t* choices,
                     const Bf16* weights,
                     const Bf16* biases,
                     const W* of_choices,
                     Bf16* y,
                     FewRowsShape shape) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ float results[kMostCombined][kOrderedLines];
  const int in = static_cast<int>(shape.in);
  const int columns = static_cast<int>(shape.columns);
  const int topk = static_cast<int>(shape.choices.topk);
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / kLanes;
  const std::int64_t first_choice = static_cast<std::int64_t>(blockIdx.y) * topk;
  const std::int64_t choice = first_choice + warp;
  const int first = static_cast<int>(blockIdx.x) * kOrderedLines;
  // The kernel before has waited for the choices.
  const std::int64_t first_line = choices[choice] * columns + first;
  const Bf16* tiles[] = {weights + first_line * in};
  CombinedColumns ordered(shared + warp * CombinedColumns::kSharedBytes, tiles, columns - first,
                          in);
  ordered.begin();
  wait_for_inputs();
  const Bf16* rows[CombinedColumns::kRowsOfLane];
#pragma unroll
  for (int i = 0; i < CombinedColumns::kRowsOfLane; ++i)
    rows[i] = CombinedColumns::row_of_lane(i) == 0 ? x + choice * in : nullptr;
  float sums[1][4] = {};
  ordered.multiply(rows, sums);
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const int line = CombinedColumns::line_of(q);
    if (CombinedColumns::row_of(q) != 0 || first + line >= columns) continue;
    results[warp][line] =
        plus_bias(sums[0][q], biases == nullptr ? nullptr : biases + first_line + line);
  }
  __syncthreads();
  release_dependents();
  if (thread >= kOrderedLines || first + thread >= columns) return;
  y[static_cast<std::int64_t>(blockIdx.y) * columns + first + thread] =
      weighed_sum(of_choices + first_choice, topk, [&](int i) { return results[i][thread]; });
}

}  // namespace

bool ordered_experts_supported(const FewRowsShape& shape) {
  return shape.in % kRingChannels == 0 && shape.choices.tokens <= kMostTokens &&
         shape.choices.topk <= kMostCombined;
}

cudaError_t ordered_combined_rows(const void* x,
                                  const std::int64_t* choices,
                                  const void* weights,
                                  const void* biases,
                                  const void* of_choices,
                                  void* y,
                                  FewRowsShape shape,
                                  Element of_weights,
                                  cudaStream_t stream) {
  if (!ordered_experts_supported(shape)) return cudaErrorInvalidValue;
  const auto topk = static_cast<unsigned>(shape.choices.topk);
  const dim3 blocks(static_cast<unsigned>(ceil_div(shape.columns, kOrderedLines)),
                    static_cast<unsigned>(shape.choices.tokens));
  return by_element(of_weights, [&](auto* none) {
    using W = std::remove_pointer_t<decltype(none)>;
    (void)launch_dependent(ordered_combined<W>, blocks, topk * kLanes,
                           topk * CombinedColumns::kSharedBytes, stream,
                           static_cast<const Bf16*>(x), choices, static_cast<const Bf16*>(weights),
                           static_cast<const Bf16*>(biases), static_cast<const W*>(of_choices),
                           static_cast<Bf16*>(y), shape);
  });
}

cudaError_t ordered_gated_rows(const void* x,
                               const std::int64_t* choices,
                               const void* weights,
                               const void* biases,
                               void* y,
                               FewRowsShape shape,
                               cudaStream_t stream) {
  if (!ordered_experts_supported(shape)) return cudaErrorInvalidValue;
  const dim3 blocks(static_cast<unsigned>(ceil_div(shape.columns, kOrderedLines)),
                    static_cast<unsigned>(shape.choices.tokens * shape.choices.topk));
  return launch_dependent(ordered_gated, blocks, kLanes, GatedColumns::kSharedBytes, stream,
                          static_cast<const Bf16*>(x), choices, static_cast<const Bf16*>(weights),
                          static_cast<const Bf16*>(biases), static_cast<Bf16*>(y), shape);
}

}  // namespace ferry::models::launch
