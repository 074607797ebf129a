#include "models/kernels/cuda/cuda_element.cuh"
#include "models/kernels/cuda/gated_units.cuh"
#include "models/kernels/delta/delta_launch.h"

namespace ferry::models::launch {
namespace {

using Bf16 = __nv_bfloat16;

constexpr int kDim = static_cast<int>(kDeltaDim);
constexpr int kWarps = 4;
constexpr int kKeysOfWarp = kDim / kWarps;
constexpr int kOfLane = kDim / kLanes;  // value channels
constexpr unsigned kAllLanes = 0xffffffff;
static_assert(kOfLane == 4, "a lane reads its channels of the state at once");

// A channel's convolution: `tokens` up to the one that it is of.
template <int kTaps>
__device__ Bf16 convolved(const Bf16 (&tokens)[kTaps], const Bf16* weight) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kTaps; ++i) sum = __fmaf_rn(widen(tokens[i]), widen(weight[i]), sum);
  return narrow<Bf16>(silu(rounded<Bf16>(sum)));
}

template <int kTaps>
__device__ void move_on(Bf16 (&tokens)[kTaps]) {
#pragma unroll
  for (int i = 0; i + 1 < kTaps; ++i) tokens[i] = tokens[i + 1];
}

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

// The same of several tokens of each sequence: a thread walks along kRowsOfThread of a channel's.
constexpr int kRowsOfThread = 16;
template <int kTaps>
__global__ void convolve_rows(DeltaTokens all, const Bf16* before, int channels) {
  release_dependents();
  wait_for_inputs();
  const int channel = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const std::int64_t count = all.counts[blockIdx.z];
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.y) * kRowsOfThread;
  if (channel >= channels || first >= count) return;
  const std::int64_t begin = all.rows[blockIdx.z] * channels + channel;
  const auto* const mixed = static_cast<const Bf16*>(all.mixed) + begin;
  auto* const output = static_cast<Bf16*>(all.convolved) + begin;
  const auto* const weight =
      static_cast<const Bf16*>(all.conv_weight) + static_cast<std::int64_t>(channel) * kTaps;
  Bf16 tokens[kTaps];
#pragma unroll
  for (int i = 0; i < kTaps - 1; ++i) {
    const std::int64_t token = first + i - (kTaps - 1);
    const std::int64_t in_state = blockIdx.z * (kTaps - 1) + token + kTaps - 1;
    tokens[i] = token >= 0          ? mixed[token * channels]
                : before == nullptr ? narrow<Bf16>(0.0F)
                                    : before[in_state * channels + channel];
  }
  const std::int64_t end = min(first + kRowsOfThread, count);
  for (std::int64_t row = first; row < end; ++row) {
    tokens[kTaps - 1] = mixed[row * channels];
    output[row * channels] = convolved<kTaps>(tokens, weight);
    move_on<kTaps>(tokens);
  }
}

__device__ float sum_of_warp(float value) {
  for (int offset = kLanes / 2; offset > 0; offset /= 2)
    value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
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

// What a thread reads of a token.
struct TokenInputs {
  Vector<Bf16, kOfLane> side;  // of the query in warp 0, of the key in warp 1
  Vector<Bf16, kOfLane> value;
  Vector<Bf16, kOfLane> gate;  // in warp 0
  Bf16 alpha;
  Bf16 beta;
};

__device__ TokenInputs
read_token(const DeltaTokens& all, std::int64_t row, int head, int warp, int lane) {
  const int key_head = head / (all.heads / all.key_heads);
  const std::int64_t channels = (2 * all.key_heads + all.heads) * kDim;
  const auto* const convolved =
      static_cast<const Bf16*>(all.convolved) + row * channels + lane * kOfLane;
  const std::int64_t of_head = row * all.heads + head;
  TokenInputs inputs;
  if (warp < 2) inputs.side = load<kOfLane>(convolved + (warp * all.key_heads + key_head) * kDim);
  inputs.value = load<kOfLane>(convolved + (2 * all.key_heads + head) * kDim);
  if (warp == 0)
    inputs.gate =
        load<kOfLane>(static_cast<const Bf16*>(all.gate) + of_head * kDim + lane * kOfLane);
  inputs.alpha = static_cast<const Bf16*>(all.alpha)[of_head];
  inputs.beta = static_cast<const Bf16*>(all.beta)[of_head];
  return inputs;
}

// A block has the state of one head of one sequence in registers: each warp some keys' rows, each
// lane four channels of values. It walks along the sequence's tokens; the state is read once and
// written once.
__global__ void __launch_bounds__(kWarps* kLanes) recur(DeltaTokens all) {
  __shared__ __align__(16) StepShared shared;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  const int head = static_cast<int>(blockIdx.x);
  release_dependents();
  wait_for_inputs();
  const std::int64_t row = all.rows[blockIdx.y];
  const std::int64_t end = row + (all.counts == nullptr ? 1 : all.counts[blockIdx.y]);
  float4* state = nullptr;
  float4 held[kKeysOfWarp]{};
  if (all.states != nullptr) {
    state = reinterpret_cast<float4*>(
        all.states +
        ((all.slots[blockIdx.y] * all.heads + head) * kDim + warp * kKeysOfWarp) * kDim);
#pragma unroll
    for (int i = 0; i < kKeysOfWarp; ++i) held[i] = state[i * kLanes + lane];
  }
  const float rate = -::expf(all.a_log[head]);
  const float bias = all.dt_bias[head];
  float weights[kOfLane];
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) weights[i] = all.norm[lane * kOfLane + i];

  TokenInputs next;
  if (row < end) next = read_token(all, row, head, warp, lane);
  for (std::int64_t at = row; at < end; ++at) {
    const auto token = next;
    if (at + 1 < end) next = read_token(all, at + 1, head, warp, lane);
    if (warp < 2) {  // one norms the query, one the key
      float squares = 0;
#pragma unroll
      for (int i = 0; i < kOfLane; ++i)
        squares = __fmaf_rn(widen(token.side.at[i]), widen(token.side.at[i]), squares);
      float factor = rsqrtf(sum_of_warp(squares) + 1e-6F);
      if (warp == 0) factor *= rsqrtf(static_cast<float>(kDim));
      auto* const to = warp == 0 ? shared.query : shared.key;
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) to[lane * kOfLane + i] = widen(token.side.at[i]) * factor;
    }
    const float x = widen(token.alpha) + bias;
    const float softplus = x > 20 ? x : log1pf(::expf(x));
    const float decay = ::expf(rate * softplus);
    const float beta = rounded<Bf16>(1.0F / (1.0F + ::expf(-widen(token.beta))));
    __syncthreads();

    float4 of_key{};
#pragma unroll
    for (int i = 0; i < kKeysOfWarp; ++i) {
      const float key = shared.key[warp * kKeysOfWarp + i];
      auto& one = held[i];
      one = {one.x * decay, one.y * decay, one.z * decay, one.w * decay};
      of_key = {__fmaf_rn(one.x, key, of_key.x), __fmaf_rn(one.y, key, of_key.y),
                __fmaf_rn(one.z, key, of_key.z), __fmaf_rn(one.w, key, of_key.w)};
    }
    of_key = sum_of_block(shared, of_key, warp, lane);
    const float4 delta{
        (widen(token.value.at[0]) - of_key.x) * beta, (widen(token.value.at[1]) - of_key.y) * beta,
        (widen(token.value.at[2]) - of_key.z) * beta, (widen(token.value.at[3]) - of_key.w) * beta};
    float4 result{};
#pragma unroll
    for (int i = 0; i < kKeysOfWarp; ++i) {
      const float key = shared.key[warp * kKeysOfWarp + i];
      const float query = shared.query[warp * kKeysOfWarp + i];
      auto& one = held[i];
      one = {__fmaf_rn(key, delta.x, one.x), __fmaf_rn(key, delta.y, one.y),
             __fmaf_rn(key, delta.z, one.z), __fmaf_rn(key, delta.w, one.w)};
      result = {__fmaf_rn(one.x, query, result.x), __fmaf_rn(one.y, query, result.y),
                __fmaf_rn(one.z, query, result.z), __fmaf_rn(one.w, query, result.w)};
    }
    // Its last barrier is behind all reads of this token's key and query.
    result = sum_of_block(shared, result, warp, lane);
    if (warp != 0) continue;

    // The norm with its gate, with the roundings of gated_rms_norm().
    float out[kOfLane] = {rounded<Bf16>(result.x), rounded<Bf16>(result.y), rounded<Bf16>(result.z),
                          rounded<Bf16>(result.w)};
    float squares = 0;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) squares = __fmaf_rn(out[i], out[i], squares);
    const float inverse = rsqrtf(sum_of_warp(squares) / kDim + all.epsilon);
    Vector<Bf16, kOfLane> y;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const float weight = rounded<Bf16>(weights[i] + 1.0F);
      const float normed = rounded<Bf16>(weight * rounded<Bf16>(out[i] * inverse));
      y.at[i] = narrow<Bf16>(normed * silu(widen(token.gate.at[i])));
    }
    store(static_cast<Bf16*>(all.output) + (at * all.heads + head) * kDim + lane * kOfLane, y);
  }
  if (state == nullptr) return;
#pragma unroll
  for (int i = 0; i < kKeysOfWarp; ++i) state[i * kLanes + lane] = held[i];
}

// Calls run(taps), a constant of the compiler.
template <typename Run>
cudaError_t with_taps(int taps, const Run& run) {
  switch (taps) {
    case 2:
      return run(std::integral_constant<int, 2>{});
    case 3:
      return run(std::integral_constant<int, 3>{});
    case 4:
      return run(std::integral_constant<int, 4>{});
    default:
      return cudaErrorInvalidValue;
  }
}

constexpr int kConvolving = 256;  // threads

cudaError_t launch_recur(const DeltaTokens& tokens, cudaStream_t stream) {
  return launch_dependent(
      recur, dim3(static_cast<unsigned>(tokens.heads), static_cast<unsigned>(tokens.sequences)),
      kWarps * kLanes, 0, stream, tokens);
}

}  // namespace

cudaError_t delta_step(const DeltaTokens& tokens, void* conv_states, cudaStream_t stream) {
  if (tokens.sequences == 0) return cudaSuccess;
  const int channels = (2 * tokens.key_heads + tokens.heads) * kDim;
  const dim3 blocks(static_cast<unsigned>(ceil_div(channels, kConvolving)),
                    static_cast<unsigned>(tokens.sequences));
  const auto status = with_taps(tokens.taps, [&](auto taps) {
    return launch_dependent(convolve<taps.value>, blocks, kConvolving, 0, stream, tokens,
                            static_cast<Bf16*>(conv_states), channels);
  });
  return status == cudaSuccess ? launch_recur(tokens, stream) : status;
}

cudaError_t delta_walk(const DeltaTokens& tokens,
                       const void* before,
                       std::int64_t most,
                       cudaStream_t stream) {
  if (tokens.sequences == 0 || most == 0) return cudaSuccess;
  const int channels = (2 * tokens.key_heads + tokens.heads) * kDim;
  const dim3 blocks(static_cast<unsigned>(ceil_div(channels, kConvolving)),
                    static_cast<unsigned>(ceil_div(most, kRowsOfThread)),
                    static_cast<unsigned>(tokens.sequences));
  const auto status = with_taps(tokens.taps, [&](auto taps) {
    return launch_dependent(convolve_rows<taps.value>, blocks, kConvolving, 0, stream, tokens,
                            static_cast<const Bf16*>(before), channels);
  });
  return status == cudaSuccess ? launch_recur(tokens, stream) : status;
}

}  // namespace ferry::models::launch
