#include <cooperative_groups.h>

#include "models/kernels/cuda/weight_lines.cuh"
#include "models/kernels/experts/choose_for.cuh"
#include "models/kernels/experts/expert_epilogue.cuh"
#include "models/kernels/experts/expert_launch.h"

namespace ferry::models::launch {
namespace {

constexpr int kWarps = 8;
constexpr int kMostWarps = 16;
constexpr int kColumns = 4;  // of a warp
constexpr int kGatedColumns = 2;

// The gated half of a choice's expert: blockIdx.y is the choice.
__global__ void __launch_bounds__(kWarps* kLanes, 3) gated_rows(const Bf16* x,
                                                                const std::int64_t* choices,
                                                                const Bf16* weights,
                                                                const Bf16* biases,
                                                                Bf16* y,
                                                                FewRowsShape shape) {
  const int in = static_cast<int>(shape.in);
  const int columns = static_cast<int>(shape.columns);
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  const int first = (static_cast<int>(blockIdx.x) * kWarps + warp) * kGatedColumns;
  const int choice = static_cast<int>(blockIdx.y);
  wait_for_inputs();
  release_dependents();
  if (first >= columns) return;
  const std::int64_t first_line = choices[choice] * 2 * columns;
  const Bf16* lines[2 * kGatedColumns];
#pragma unroll
  for (int line = 0; line < 2 * kGatedColumns; ++line) {
    const int column = min(first + line % kGatedColumns, columns - 1);
    lines[line] = weights + (first_line + line / kGatedColumns * columns + column) * in;
  }
  float sums[1][2 * kGatedColumns] = {};
  multiply(x + static_cast<std::int64_t>(choice / static_cast<int>(shape.choices.topk)) * in, lines,
           in, sums);
  const int column = first + lane;
  if (lane >= kGatedColumns || column >= columns) return;
  const auto* const bias = biases == nullptr ? nullptr : biases + first_line + column;
  const float gate = plus_bias(lane == 0 ? sums[0][0] : sums[0][1], bias);
  const float up = plus_bias(lane == 0 ? sums[0][kGatedColumns] : sums[0][kGatedColumns + 1],
                             bias == nullptr ? nullptr : bias + columns);
  y[static_cast<std::int64_t>(choice) * columns + column] =
      narrow<Bf16>(gated(gate, up, shape.activation));
}

// A token's results of all its experts, and their weighed sum: a warp multiplies kColumns columns
// of one choice, `of_choice` warps share a choice of the block. Rounds and adds up choices as
// combine_choices() does.
template <typename W, int kBlockWarps>
__global__ void __launch_bounds__(kBlockWarps* kLanes, 32 / kBlockWarps)
    combined(const Bf16* x,
             const std::int64_t* choices,
             const Bf16* weights,
             const Bf16* biases,
             const W* of_choices,
             Bf16* y,
             FewRowsShape shape,
             int of_choice) {
  __shared__ float results[kBlockWarps][kColumns];
  const int in = static_cast<int>(shape.in);
  const int columns = static_cast<int>(shape.columns);
  const int topk = static_cast<int>(shape.choices.topk);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kLanes;
  const int warp = thread / kLanes;
  const std::int64_t first_choice = static_cast<std::int64_t>(blockIdx.y) * topk;
  const std::int64_t choice = first_choice + warp / of_choice;
  const int of_block = of_choice * kColumns;
  const int first = static_cast<int>(blockIdx.x) * of_block + warp % of_choice * kColumns;
  const std::int64_t expert = choices[choice];  // the kernel before has waited for it
  const Bf16* lines[kColumns];
#pragma unroll
  for (int line = 0; line < kColumns; ++line)
    lines[line] = weights + (expert * columns + min(first + line, columns - 1)) * in;
#pragma unroll
  for (int line = 0; line < kColumns; ++line) fetch_row(lines[line], in);
  release_dependents();
  wait_for_inputs();
  float sums[1][kColumns] = {};
  multiply(x + choice * in, lines, in, sums);
#pragma unroll
  for (int line = 0; line < kColumns; ++line) {
    const auto* const bias =
        biases == nullptr ? nullptr : biases + expert * columns + min(first + line, columns - 1);
    if (lane == 0) results[warp][line] = plus_bias(sums[0][line], bias);
  }
  __syncthreads();
  const int column = static_cast<int>(blockIdx.x) * of_block + thread;
  if (thread >= of_block || column >= columns) return;
  y[static_cast<std::int64_t>(blockIdx.y) * columns + column] = weighed_sum(
      of_choices + first_choice, topk,
      [&](int i) { return results[i * of_choice + thread / kColumns][thread % kColumns]; });
}

constexpr int kClusterBlocks = 8;
constexpr int kRouteWarps = 16;

// The blocks of a cluster multiply a token's row by the rows of all experts, a warp an expert at a
// time; then a warp of the first block chooses.
__global__ void __cluster_dims__(kClusterBlocks, 1, 1) __launch_bounds__(kRouteWarps* kLanes)
    route(const Bf16* x,
          const Bf16* weight,
          Bf16* logits,
          std::int64_t* experts,
          Bf16* weights,
          ChoicesShape shape,
          std::int64_t hidden,
          bool normalize) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  const int in = static_cast<int>(hidden);
  const int num_experts = static_cast<int>(shape.experts);
  const std::int64_t token = blockIdx.y;
  const int first = static_cast<int>(blockIdx.x) * kRouteWarps + warp;
  if (first < num_experts) fetch_row(weight + static_cast<std::int64_t>(first) * in, in);
  release_dependents();
  wait_for_inputs();
  const Bf16* const row = x + token * in;
  for (int expert = first; expert < num_experts; expert += kClusterBlocks * kRouteWarps) {
    const Bf16* const line = weight + static_cast<std::int64_t>(expert) * in;
    float sum = 0;
#pragma unroll 8
    for (int at = lane * kWide; at < in; at += kStep) {
      float w[kWide];
      float numbers[kWide];
      unpack(*reinterpret_cast<const uint4*>(line + at), w);
      unpack(*reinterpret_cast<const uint4*>(row + at), numbers);
#pragma unroll
      for (int i = 0; i < kWide; ++i) sum = __fmaf_rn(numbers[i], w[i], sum);
    }
    sum = sum_over_lanes(sum);
    if (lane == 0) logits[token * num_experts + expert] = narrow<Bf16>(sum);
  }
  cooperative_groups::this_cluster().sync();
  if (blockIdx.x != 0 || warp != 0) return;
  if (num_experts <= 4 * kLanes)
    choose_for<4>(token, logits, experts, weights, shape, normalize);
  else
    choose_for<kMostOfLane>(token, logits, experts, weights, shape, normalize);
}

}  // namespace

bool few_tokens_supported(const FewRowsShape& shape) {
  return shape.choices.topk <= kMostWarps && shape.in % kWide == 0;
}

cudaError_t gated_expert_rows(const void* x,
                              const std::int64_t* choices,
                              const void* weights,
                              const void* biases,
                              void* y,
                              FewRowsShape shape,
                              cudaStream_t stream) {
  if (!few_tokens_supported(shape)) return cudaErrorInvalidValue;
  constexpr int kOfBlock = kWarps * kGatedColumns;
  const dim3 blocks(static_cast<unsigned>(ceil_div(shape.columns, kOfBlock)),
                    static_cast<unsigned>(shape.choices.tokens * shape.choices.topk));
  return launch_dependent(gated_rows, blocks, kWarps * kLanes, 0, stream,
                          static_cast<const Bf16*>(x), choices, static_cast<const Bf16*>(weights),
                          static_cast<const Bf16*>(biases), static_cast<Bf16*>(y), shape);
}

cudaError_t combined_expert_rows(const void* x,
                                 const std::int64_t* choices,
                                 const void* weights,
                                 const void* biases,
                                 const void* of_choices,
                                 void* y,
                                 FewRowsShape shape,
                                 Element of_weights,
                                 cudaStream_t stream) {
  if (!few_tokens_supported(shape)) return cudaErrorInvalidValue;
  const int topk = static_cast<int>(shape.choices.topk);
  const int of_choice = topk < kWarps ? kWarps / topk : 1;
  const int of_block = of_choice * kColumns;
  const dim3 blocks(static_cast<unsigned>(ceil_div(shape.columns, of_block)),
                    static_cast<unsigned>(shape.choices.tokens));
  return by_element(of_weights, [&](auto* none) {
    using W = std::remove_pointer_t<decltype(none)>;
    const auto run = [&](auto* kernel) {
      (void)launch_dependent(kernel, blocks, static_cast<unsigned>(topk * of_choice * kLanes), 0,
                             stream, static_cast<const Bf16*>(x), choices,
                             static_cast<const Bf16*>(weights), static_cast<const Bf16*>(biases),
                             static_cast<const W*>(of_choices), static_cast<Bf16*>(y), shape,
                             of_choice);
    };
    if (topk > kWarps)
      run(combined<W, kMostWarps>);
    else
      run(combined<W, kWarps>);
  });
}

bool route_few_supported(ChoicesShape shape, std::int64_t hidden) {
  return shape.experts <= kMostOfLane * kLanes && shape.topk <= kLanes && hidden % kWide == 0;
}

cudaError_t route_few(const void* x,
                      const void* weight,
                      void* logits,
                      std::int64_t* experts,
                      void* weights,
                      ChoicesShape shape,
                      std::int64_t hidden,
                      bool normalize,
                      cudaStream_t stream) {
  if (!route_few_supported(shape, hidden)) return cudaErrorInvalidValue;
  return launch_dependent(route, dim3(kClusterBlocks, static_cast<unsigned>(shape.tokens)),
                          kRouteWarps * kLanes, 0, stream, static_cast<const Bf16*>(x),
                          static_cast<const Bf16*>(weight), static_cast<Bf16*>(logits), experts,
                          static_cast<Bf16*>(weights), shape, hidden, normalize);
}

}  // namespace ferry::models::launch
