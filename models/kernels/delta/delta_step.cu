#include "models/kernels/delta/delta_tokens.cuh"

namespace ferry::models::launch {
namespace {

constexpr int kWarps = kChains;

// Convolves the new token of each sequence with the tokens before it, which it replaces by the
// newer ones.
template <int kTaps>
__global__ void convolve(DeltaTokens all, Bf16* conv_states, int channels) {
  release_dependents();
  wait_for_inputs();
  const int channel = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (channel >= channels) return;
  const std::int64_t at = all.rows[blockIdx.y] * channels + channel;
  auto* const state = conv_states + all.slots[blockIdx.y] * (kTaps - 1) * channels + channel;
  Bf16 tokens[kTaps];
#pragma unroll
  for (int i = 0; i < kTaps - 1; ++i) tokens[i] = state[i * channels];
  tokens[kTaps - 1] = static_cast<const Bf16*>(all.mixed)[at];
#pragma unroll
  for (int i = 0; i < kTaps - 1; ++i) state[i * channels] = tokens[i + 1];
  static_cast<Bf16*>(all.convolved)[at] =
      convolved<kTaps>(tokens, static_cast<const Bf16*>(all.conv_weight) +
                                   static_cast<std::int64_t>(channel) * kTaps);
}

struct StepShared {
  float key[kDim];
  float query[kDim];
  float part[kWarps][kDim];
};

// The sum over warps of what each has for every value channel; `sum` are the lane's four channels.
__device__ float4 sum_of_block(StepShared& shared, float4 sum, int warp, int lane) {
  *reinterpret_cast<float4*>(&shared.part[warp][lane * kOfLane]) = sum;
  __syncthreads();
  float4 total{};
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    const auto part = *reinterpret_cast<const float4*>(&shared.part[i][lane * kOfLane]);
    total = {total.x + part.x, total.y + part.y, total.z + part.z, total.w + part.w};
  }
  __syncthreads();
  return total;
}

// A block has the state of one head of one sequence in registers: each warp the keys of a chain,
// each lane four channels of values. The state is read once and written once.
__global__ void __launch_bounds__(kWarps* kLanes) recur(DeltaTokens all) {
  __shared__ __align__(16) StepShared shared;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  const int head = static_cast<int>(blockIdx.x);
  release_dependents();
  wait_for_inputs();
  const std::int64_t row = all.rows[blockIdx.y];
  auto* const state = reinterpret_cast<float4*>(
      all.states +
      ((all.slots[blockIdx.y] * all.heads + head) * kDim + warp * kKeysOfChain) * kDim);
  float4 held[kKeysOfChain];
#pragma unroll
  for (int i = 0; i < kKeysOfChain; ++i) held[i] = state[i * kLanes + lane];

  const int key_head = head / (all.heads / all.key_heads);
  const auto* const of_row = static_cast<const Bf16*>(all.convolved) +
                             row * (2 * all.key_heads + all.heads) * kDim + lane * kOfLane;
  if (warp < 2) {  // one norms the query, one the key
    const auto side = load<kOfLane>(of_row + (warp * all.key_heads + key_head) * kDim);
    const float factor = warp == 0 ? query_factor(side) : key_factor(side);
    auto* const to = warp == 0 ? shared.query : shared.key;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) to[lane * kOfLane + i] = widen(side.at[i]) * factor;
  }
  const auto [decay, beta] = decay_and_beta(all, row, head);
  const auto value = load<kOfLane>(of_row + (2 * all.key_heads + head) * kDim);
  __syncthreads();

  float4 of_key{};
#pragma unroll
  for (int i = 0; i < kKeysOfChain; ++i) {
    const float key = shared.key[warp * kKeysOfChain + i];
    auto& one = held[i];
    one = {one.x * decay, one.y * decay, one.z * decay, one.w * decay};
    of_key = {__fmaf_rn(one.x, key, of_key.x), __fmaf_rn(one.y, key, of_key.y),
              __fmaf_rn(one.z, key, of_key.z), __fmaf_rn(one.w, key, of_key.w)};
  }
  of_key = sum_of_block(shared, of_key, warp, lane);
  const float4 delta{(widen(value.at[0]) - of_key.x) * beta, (widen(value.at[1]) - of_key.y) * beta,
                     (widen(value.at[2]) - of_key.z) * beta,
                     (widen(value.at[3]) - of_key.w) * beta};
  float4 result{};
#pragma unroll
  for (int i = 0; i < kKeysOfChain; ++i) {
    const float key = shared.key[warp * kKeysOfChain + i];
    const float query = shared.query[warp * kKeysOfChain + i];
    auto& one = held[i];
    one = {__fmaf_rn(key, delta.x, one.x), __fmaf_rn(key, delta.y, one.y),
           __fmaf_rn(key, delta.z, one.z), __fmaf_rn(key, delta.w, one.w)};
    state[i * kLanes + lane] = one;
    result = {__fmaf_rn(one.x, query, result.x), __fmaf_rn(one.y, query, result.y),
              __fmaf_rn(one.z, query, result.z), __fmaf_rn(one.w, query, result.w)};
  }
  result = sum_of_block(shared, result, warp, lane);
  if (warp != 0) return;
  norm_and_gate(all, row, head, lane,
                {rounded<Bf16>(result.x), rounded<Bf16>(result.y), rounded<Bf16>(result.z),
                 rounded<Bf16>(result.w)});
}

}  // namespace

cudaError_t delta_step(const DeltaTokens& tokens, void* conv_states, cudaStream_t stream) {
  if (tokens.sequences == 0) return cudaSuccess;
  constexpr int kThreads = 256;
  const int channels = channels_of(tokens);
  const auto sequences = static_cast<unsigned>(tokens.sequences);
  const auto status = with_taps(tokens.taps, [&](auto taps) {
    return launch_dependent(convolve<taps.value>,
                            dim3(static_cast<unsigned>(ceil_div(channels, kThreads)), sequences),
                            kThreads, 0, stream, tokens, static_cast<Bf16*>(conv_states), channels);
  });
  if (status != cudaSuccess) return status;
  return launch_dependent(recur, dim3(static_cast<unsigned>(tokens.heads), sequences),
                          kWarps * kLanes, 0, stream, tokens);
}

}  // namespace ferry::models::launch
