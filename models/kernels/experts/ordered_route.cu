#include <cooperative_groups.h>

#include "models/kernels/cuda/ordered_columns.cuh"
#include "models/kernels/experts/choose_for.cuh"
#include "models/kernels/experts/expert_launch.h"

namespace ferry::models::launch {
namespace {

using Columns = OrderedColumns<1, 12>;
constexpr int kClusterBlocks = 8;
constexpr int kMostWarps = 4;
static_assert(kClusterBlocks * kMostWarps * kOrderedLines == kMostOfLane * kLanes);

// A warp multiplies all tokens by the rows of 16 experts; then each block of the cluster chooses
// for one token.
__global__ void __cluster_dims__(kClusterBlocks, 1, 1) __launch_bounds__(kMostWarps* kLanes)
    ordered_route(const Bf16* x,
                  const Bf16* weight,
                  Bf16* logits,
                  std::int64_t* experts,
                  Bf16* weights,
                  ChoicesShape shape,
                  std::int64_t hidden,
                  bool normalize) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  const int num_experts = static_cast<int>(shape.experts);
  const int tokens = static_cast<int>(shape.tokens);
  const int first = (warp * kClusterBlocks + static_cast<int>(blockIdx.x)) * kOrderedLines;
  release_dependents();
  if (first < num_experts) {
    const Bf16* const tiles[] = {weight + first * hidden};
    Columns columns(shared + warp * Columns::kSharedBytes, tiles, num_experts - first,
                    static_cast<int>(hidden));
    columns.begin();
    wait_for_inputs();
    const Bf16* rows[Columns::kRowsOfLane];
#pragma unroll
    for (int i = 0; i < Columns::kRowsOfLane; ++i) {
      const int row = Columns::row_of_lane(i);
      rows[i] = row < tokens ? x + row * hidden : nullptr;
    }
    float sums[1][4] = {};
    columns.multiply(rows, sums);
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int expert = first + Columns::line_of(q);
      const int row = Columns::row_of(q);
      if (expert < num_experts && row < tokens)
        logits[row * num_experts + expert] = narrow<Bf16>(sums[0][q]);
    }
  }
  cooperative_groups::this_cluster().sync();
  const int token = static_cast<int>(blockIdx.x);
  if (token >= tokens || warp != 0) return;
  if (num_experts <= 4 * kLanes)
    choose_for<4, true>(token, logits, experts, weights, shape, normalize);
  else
    choose_for<kMostOfLane, true>(token, logits, experts, weights, shape, normalize);
}

}  // namespace

bool route_ordered_supported(ChoicesShape shape, std::int64_t hidden) {
  return shape.experts <= kMostOfLane * kLanes && shape.topk <= kLanes &&
         shape.tokens <= std::min(kOrderedRows, kClusterBlocks) && hidden % kRingChannels == 0;
}

cudaError_t route_ordered(const void* x,
                          const void* weight,
                          void* logits,
                          std::int64_t* experts,
                          void* weights,
                          ChoicesShape shape,
                          std::int64_t hidden,
                          bool normalize,
                          cudaStream_t stream) {
  if (!route_ordered_supported(shape, hidden)) return cudaErrorInvalidValue;
  const auto warps = static_cast<unsigned>(ceil_div(shape.experts, kClusterBlocks * kOrderedLines));
  return launch_dependent(ordered_route, kClusterBlocks, warps * kLanes,
                          warps * Columns::kSharedBytes, stream, static_cast<const Bf16*>(x),
                          static_cast<const Bf16*>(weight), static_cast<Bf16*>(logits), experts,
                          static_cast<Bf16*>(weights), shape, hidden, normalize);
}

}  // namespace ferry::models::launch
