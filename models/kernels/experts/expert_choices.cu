#include "models/kernels/cuda/cuda_element.cuh"
#include "models/kernels/experts/choose_for.cuh"
#include "models/kernels/experts/expert_launch.h"

namespace ferry::models::launch {
namespace {

constexpr int kOrderThreads = 1024;
constexpr int kOrderWarps = kOrderThreads / kLanes;
static_assert(kOrderWarps == kLanes, "a warp sums what the warps counted");
constexpr unsigned kAllLanes = 0xffffffff;
constexpr int kAtOnce = 4;  // loads of a thread on their way

__device__ int warp_sum(int value) {
  for (int offset = kLanes / 2; offset > 0; offset /= 2)
    value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}

// A block finds the places of one expert's choices: behind those of lower experts, which it counts,
// in the order in which they come. The block behind the last expert does so for the choices of
// experts outside of the range. Few experts have several blocks each, a part of the choices for
// one. Each warp has a part of the block's.
__global__ void __launch_bounds__(kOrderThreads) order_choices(const std::int64_t* choices,
                                                               std::int64_t* order,
                                                               std::int64_t* inverse,
                                                               std::int32_t* ends,
                                                               int num_choices,
                                                               std::int64_t first_expert,
                                                               int num_experts) {
  __shared__ int before_of[kOrderWarps];
  __shared__ int behind_of[kOrderWarps];
  __shared__ int equal_of[kOrderWarps];
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  const int expert = static_cast<int>(blockIdx.x);
  const int of_block = ceil_div(num_choices, static_cast<int>(gridDim.y));
  const int block_begin = static_cast<int>(blockIdx.y) * of_block;
  const int block_end = min(block_begin + of_block, num_choices);
  const int share = ceil_div(of_block, kOrderThreads) * kLanes;
  const int begin = min(block_begin + warp * share, block_end);
  const int end = min(begin + share, block_end);
  const auto local_expert = [&](int i) {
    const std::int64_t local = choices[i] - first_expert;
    return local < 0 || local >= num_experts ? num_experts : static_cast<int>(local);
  };
  release_dependents();
  wait_for_inputs();
  int before = 0;  // choices of lower experts, and of this one in blocks before
  int behind = 0;  // of this one in blocks behind
  int equal = 0;   // of this one in the warp's part
#pragma unroll kAtOnce
  for (int i = begin + lane; i < end; i += kLanes) {
    const int local = local_expert(i);
    before += local < expert ? 1 : 0;
    equal += local == expert ? 1 : 0;
  }
  const auto count = [&](int from, int to, int& of_expert) {
#pragma unroll kAtOnce
    for (int i = from + static_cast<int>(threadIdx.x); i < to; i += kOrderThreads) {
      const int local = local_expert(i);
      before += local < expert ? 1 : 0;
      of_expert += local == expert ? 1 : 0;
    }
  };
  count(0, block_begin, before);
  count(block_end, num_choices, behind);
  before = warp_sum(before);
  behind = warp_sum(behind);
  equal = warp_sum(equal);
  if (lane == 0) {
    before_of[warp] = before;
    behind_of[warp] = behind;
    equal_of[warp] = equal;
  }
  __syncthreads();
  int place = warp_sum(before_of[lane]) + warp_sum(lane < warp ? equal_of[lane] : 0);
  const int last = warp_sum(before_of[lane] + behind_of[lane] + equal_of[lane]);
  for (int first = begin; first < end; first += kAtOnce * kLanes) {
    bool mine[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int i = first + j * kLanes + lane;
      mine[j] = i < end && local_expert(i) == expert;
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const unsigned votes = __ballot_sync(kAllLanes, mine[j]);
      if (mine[j]) {
        const int i = first + j * kLanes + lane;
        const int at = place + __popc(votes & ((1U << lane) - 1));
        order[at] = i;
        inverse[i] = at;
      }
      place += __popc(votes);
    }
  }
  if (threadIdx.x == 0 && blockIdx.y == 0 && expert < num_experts) ends[expert] = last;
}

constexpr int kRowsOfBlock = 8;

// A warp copies a row.
template <typename Unit>
__global__ void __launch_bounds__(kRowsOfBlock* kLanes) gather(const Unit* x,
                                                               const std::int64_t* order,
                                                               Unit* rows,
                                                               std::int64_t num_rows,
                                                               std::int64_t topk,
                                                               std::int64_t units) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kRowsOfBlock + threadIdx.y;
  release_dependents();
  wait_for_inputs();
  if (row >= num_rows) return;
  const Unit* const from = x + order[row] / topk * units;
  Unit* const to = rows + row * units;
#pragma unroll 8
  for (std::int64_t i = threadIdx.x; i < units; i += kLanes) to[i] = from[i];
}

__global__ void rank_choices(const std::int64_t* experts, std::int64_t* ranks, ChoicesShape shape) {
  const std::int64_t choice = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  release_dependents();
  wait_for_inputs();
  if (choice >= shape.tokens * shape.topk) return;
  const std::int64_t rank = experts[choice] / shape.experts;
  bool repeated = false;
  for (std::int64_t i = choice / shape.topk * shape.topk; i < choice; ++i)
    repeated = repeated || experts[i] / shape.experts == rank;
  ranks[choice] = repeated ? -1 : rank;
}

__global__ void list_choices(const std::int64_t* experts,
                             const std::int64_t* rows,
                             std::int32_t* choices,
                             std::int64_t num_rows,
                             ChoicesShape shape) {
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  release_dependents();
  wait_for_inputs();
  if (at >= num_rows * shape.topk) return;
  const std::int64_t choice = rows[at / shape.topk];
  const std::int64_t first = experts[choice] / shape.experts * shape.experts;
  const std::int64_t local = experts[choice / shape.topk * shape.topk + at % shape.topk] - first;
  choices[at] = local < 0 || local >= shape.experts ? -1 : static_cast<std::int32_t>(local);
}

// Sums run in four chains, which are added up at last, as ATen sums a short dimension that is not
// the last.
constexpr int kChains = 4;

template <int N, typename T, typename W>
__global__ void combine(const T* results,
                        const std::int64_t* inverse,
                        const std::int32_t* end,
                        const W* weights,
                        T* y,
                        ChoicesShape shape,
                        std::int64_t hidden) {
  release_dependents();
  wait_for_inputs();
  const std::int64_t of_row = hidden / N;
  const int topk = static_cast<int>(shape.topk);
  const std::int64_t last = end == nullptr ? INT64_MAX : *end;
  for (std::int64_t at = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x;
       at < shape.tokens * of_row; at += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    const std::int64_t token = at / of_row;
    const std::int64_t column = at % of_row * N;
    float sums[kChains][N] = {};
    for (int first = 0; first < topk; first += kChains) {
#pragma unroll
      for (int chain = 0; chain < kChains; ++chain) {
        if (first + chain >= topk) break;
        const std::int64_t choice = token * topk + first + chain;
        const std::int64_t row = inverse == nullptr ? choice : inverse[choice];
        if (row >= last) continue;
        const auto values = load<N>(results + row * hidden + column);
        const float weight = widen(weights[choice]);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const float product = __fmul_rn(widen(values.at[i]), weight);
          // A product of bf16 by bf16 is rounded to bf16, one by fp32 is not.
          sums[chain][i] =
              __fadd_rn(sums[chain][i], std::is_same_v<T, W> ? rounded<T>(product) : product);
        }
      }
    }
    Vector<T, N> sum;
#pragma unroll
    for (int i = 0; i < N; ++i)
      sum.at[i] = narrow<T>(
          __fadd_rn(__fadd_rn(__fadd_rn(sums[0][i], sums[1][i]), sums[2][i]), sums[3][i]));
    store(y + token * hidden + column, sum);
  }
}

// A warp computes the gradients of one choice: of its row, and of its weight.
template <int N, typename T, typename W>
__global__ void combine_backward(const T* grads,
                                 const T* results,
                                 const std::int64_t* inverse,
                                 const std::int32_t* end,
                                 const W* weights,
                                 T* of_results,
                                 W* of_weights,
                                 ChoicesShape shape,
                                 std::int64_t hidden) {
  const std::int64_t choice = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  release_dependents();
  wait_for_inputs();
  if (choice >= shape.tokens * shape.topk) return;
  if (end != nullptr && inverse[choice] >= *end) {
    if (threadIdx.x == 0) of_weights[choice] = narrow<W>(0);
    return;
  }
  const std::int64_t row = inverse[choice] * hidden;
  const std::int64_t token = choice / shape.topk * hidden;
  const float weight = widen(weights[choice]);
  float sum = 0;
  for (std::int64_t column = threadIdx.x * N; column < hidden; column += kLanes * N) {
    const auto grad = load<N>(grads + token + column);
    const auto result = load<N>(results + row + column);
    Vector<T, N> scaled;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float g = widen(grad.at[i]);
      scaled.at[i] = narrow<T>(__fmul_rn(g, weight));
      sum = __fmaf_rn(g, widen(result.at[i]), sum);
    }
    store(of_results + row + column, scaled);
  }
  for (int offset = kLanes / 2; offset > 0; offset /= 2)
    sum += __shfl_xor_sync(kAllLanes, sum, offset);
  if (threadIdx.x == 0) of_weights[choice] = narrow<W>(sum);
}

// Calls run(width, weights as W*): 16 bytes at once where rows begin aligned.
template <typename T, typename Run>
void by_width_and_weight(
    const void* weights, std::int64_t hidden, bool aligned, bool same_type, const Run& run) {
  const auto by_weight = [&](auto width) {
    if (same_type)
      run(width, static_cast<const T*>(weights));
    else
      run(width, static_cast<const float*>(weights));
  };
  constexpr int kWide = 16 / sizeof(T);
  if (hidden % kWide == 0 && aligned)
    by_weight(std::integral_constant<int, kWide>{});
  else
    by_weight(std::integral_constant<int, 1>{});
}

// A warp chooses for one token.
template <typename T>
__global__ void choose(const T* logits,
                       std::int64_t* experts,
                       T* weights,
                       ChoicesShape shape,
                       bool normalize,
                       bool as_aten) {
  const std::int64_t token = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  release_dependents();
  wait_for_inputs();
  if (token >= shape.tokens) return;
  if (as_aten)
    choose_for<kMostOfLane, true>(token, logits, experts, weights, shape, normalize);
  else
    choose_for<kMostOfLane>(token, logits, experts, weights, shape, normalize);
}

}  // namespace

cudaError_t expert_order(const std::int64_t* choices,
                         std::int64_t* order,
                         std::int64_t* inverse,
                         std::int32_t* ends,
                         std::int64_t num_choices,
                         std::int64_t first_expert,
                         std::int64_t num_experts,
                         cudaStream_t stream) {
  if (num_choices > INT32_MAX - kOrderThreads) return cudaErrorInvalidValue;
  constexpr std::int64_t kEnoughBlocks = 128;
  constexpr std::int64_t kEnoughChoices = 2 * kOrderThreads;  // of a block
  const auto of_expert = std::clamp<std::int64_t>(
      std::min(kEnoughBlocks / (num_experts + 1), num_choices / kEnoughChoices), 1, kEnoughBlocks);
  const dim3 blocks(static_cast<unsigned>(num_experts + 1), static_cast<unsigned>(of_expert));
  return launch_dependent(order_choices, blocks, kOrderThreads, 0, stream, choices, order, inverse,
                          ends, static_cast<int>(num_choices), first_expert,
                          static_cast<int>(num_experts));
}

cudaError_t gather_rows(const void* x,
                        const std::int64_t* order,
                        void* rows,
                        std::int64_t num_rows,
                        std::int64_t topk,
                        std::int64_t row_bytes,
                        cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(ceil_div(num_rows, kRowsOfBlock));
  const auto run = [&](auto unit) {
    using Unit = decltype(unit);
    return launch_dependent(gather<Unit>, blocks, dim3(kLanes, kRowsOfBlock), 0, stream,
                            static_cast<const Unit*>(x), order, static_cast<Unit*>(rows), num_rows,
                            topk, row_bytes / static_cast<std::int64_t>(sizeof(Unit)));
  };
  const auto fits = [&](std::size_t bytes) {
    return (reinterpret_cast<std::uintptr_t>(x) | reinterpret_cast<std::uintptr_t>(rows) |
            static_cast<std::uintptr_t>(row_bytes)) %
               bytes ==
           0;
  };
  if (fits(sizeof(uint4))) return run(uint4{});
  return fits(sizeof(std::uint32_t)) ? run(std::uint32_t{}) : run(std::uint16_t{});
}

cudaError_t first_of_ranks(const std::int64_t* experts,
                           std::int64_t* ranks,
                           ChoicesShape shape,
                           cudaStream_t stream) {
  constexpr std::int64_t kThreads = 256;
  return launch_dependent(rank_choices,
                          static_cast<unsigned>(ceil_div(shape.tokens * shape.topk, kThreads)),
                          kThreads, 0, stream, experts, ranks, shape);
}

cudaError_t choices_of_rows(const std::int64_t* experts,
                            const std::int64_t* rows,
                            std::int32_t* choices,
                            std::int64_t num_rows,
                            ChoicesShape shape,
                            cudaStream_t stream) {
  constexpr std::int64_t kThreads = 256;
  return launch_dependent(list_choices,
                          static_cast<unsigned>(ceil_div(num_rows * shape.topk, kThreads)),
                          kThreads, 0, stream, experts, rows, choices, num_rows, shape);
}

cudaError_t combine_choices(const void* results,
                            const std::int64_t* inverse,
                            const std::int32_t* end,
                            const void* weights,
                            void* y,
                            ChoicesShape shape,
                            std::int64_t hidden,
                            Element element,
                            Element of_weights,
                            cudaStream_t stream) {
  constexpr std::int64_t kThreads = 256;
  return by_element(element, [&](auto* none) {
    using T = std::remove_pointer_t<decltype(none)>;
    const auto* in = static_cast<const T*>(results);
    auto* out = static_cast<T*>(y);
    const auto run = [&](auto width, const auto* of_choices) {
      constexpr int kWidth = decltype(width)::value;
      using W = std::remove_cvref_t<decltype(*of_choices)>;
      (void)launch_dependent(combine<kWidth, T, W>,
                             blocks_of(shape.tokens * hidden / kWidth, kThreads), kThreads, 0,
                             stream, in, inverse, end, of_choices, out, shape, hidden);
    };
    constexpr int kWide = 16 / sizeof(T);
    by_width_and_weight<T>(weights, hidden, is_aligned<T, kWide>(in) && is_aligned<T, kWide>(out),
                           of_weights == element, run);
  });
}

cudaError_t combine_choices_backward(const void* grads,
                                     const void* results,
                                     const std::int64_t* inverse,
                                     const std::int32_t* end,
                                     const void* weights,
                                     void* grads_of_results,
                                     void* grads_of_weights,
                                     ChoicesShape shape,
                                     std::int64_t hidden,
                                     Element element,
                                     Element of_weights,
                                     cudaStream_t stream) {
  constexpr unsigned kChoices = 8;  // of a block
  return by_element(element, [&](auto* none) {
    using T = std::remove_pointer_t<decltype(none)>;
    const auto* of_tokens = static_cast<const T*>(grads);
    const auto* in = static_cast<const T*>(results);
    auto* out = static_cast<T*>(grads_of_results);
    const auto run = [&](auto width, const auto* of_choices) {
      constexpr int kWidth = decltype(width)::value;
      using W = std::remove_cvref_t<decltype(*of_choices)>;
      const auto blocks = static_cast<unsigned>(ceil_div(shape.tokens * shape.topk, kChoices));
      (void)launch_dependent(combine_backward<kWidth, T, W>, blocks, dim3(kLanes, kChoices), 0,
                             stream, of_tokens, in, inverse, end, of_choices, out,
                             static_cast<W*>(grads_of_weights), shape, hidden);
    };
    constexpr int kWide = 16 / sizeof(T);
    by_width_and_weight<T>(
        weights, hidden,
        is_aligned<T, kWide>(of_tokens) && is_aligned<T, kWide>(in) && is_aligned<T, kWide>(out),
        of_weights == element, run);
  });
}

cudaError_t choose_experts(const void* logits,
                           std::int64_t* experts,
                           void* weights,
                           ChoicesShape shape,
                           bool normalize,
                           bool as_aten,
                           Element element,
                           cudaStream_t stream) {
  constexpr unsigned kTokens = 4;  // of a block
  if (shape.experts > kMostOfLane * kLanes || shape.topk > kLanes) return cudaErrorInvalidValue;
  return by_element(element, [&](auto* none) {
    using T = std::remove_pointer_t<decltype(none)>;
    const auto blocks = static_cast<unsigned>(ceil_div(shape.tokens, kTokens));
    (void)launch_dependent(choose<T>, blocks, dim3(kLanes, kTokens), 0, stream,
                           static_cast<const T*>(logits), experts, static_cast<T*>(weights), shape,
                           normalize, as_aten);
  });
}

}  // namespace ferry::models::launch
