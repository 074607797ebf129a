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

// Convolves the new token of each sequence with the tokens before it, which it replaces by the
// newer ones.
template <int kTaps>
__global__ void convolve(DeltaStep step, int channels) {
  release_dependents();
  wait_for_inputs();
  const int channel = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (channel >= channels) return;
  const std::int64_t row = step.rows[blockIdx.y];
  auto* const state = static_cast<Bf16*>(step.conv_states) +
                      step.slots[blockIdx.y] * (kTaps - 1) * channels + channel;
  const auto* const weight =
      static_cast<const Bf16*>(step.conv_weight) + static_cast<std::int64_t>(channel) * kTaps;
  const Bf16 now = static_cast<const Bf16*>(step.mixed)[row * channels + channel];
  Bf16 before[kTaps - 1];
#pragma unroll
  for (int i = 0; i < kTaps - 1; ++i) before[i] = state[i * channels];
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kTaps - 1; ++i) sum = __fmaf_rn(widen(before[i]), widen(weight[i]), sum);
  sum = __fmaf_rn(widen(now), widen(weight[kTaps - 1]), sum);
#pragma unroll
  for (int i = 0; i < kTaps - 2; ++i) state[i * channels] = before[i + 1];
  state[(kTaps - 2) * channels] = now;
  static_cast<Bf16*>(step.convolved)[row * channels + channel] =
      narrow<Bf16>(silu(rounded<Bf16>(sum)));
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

// A block has the state of one head of one sequence in registers: each warp some keys' rows, each
// lane four channels of values. The state is read once and written once.
__global__ void __launch_bounds__(kWarps* kLanes) recur(DeltaStep step) {
  __shared__ __align__(16) StepShared shared;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  const int head = static_cast<int>(blockIdx.x);
  release_dependents();
  wait_for_inputs();
  const std::int64_t row = step.rows[blockIdx.y];
  auto* const state = reinterpret_cast<float4*>(
      step.states +
      ((step.slots[blockIdx.y] * step.heads + head) * kDim + warp * kKeysOfWarp) * kDim);
  float4 held[kKeysOfWarp];
#pragma unroll
  for (int i = 0; i < kKeysOfWarp; ++i) held[i] = state[i * kLanes + lane];

  const int key_head = head / (step.heads / step.key_heads);
  const std::int64_t channels = 2 * step.key_heads * kDim + step.heads * kDim;
  const auto* const convolved = static_cast<const Bf16*>(step.convolved) + row * channels;
  const auto* const queries = convolved + key_head * kDim;
  const auto* const keys = queries + step.key_heads * kDim;
  const auto* const values = convolved + (2 * step.key_heads + head) * kDim;
  if (warp < 2) {  // one norms the query, one the key
    const auto read = load<kOfLane>((warp == 0 ? queries : keys) + lane * kOfLane);
    float squares = 0;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) squares += widen(read.at[i]) * widen(read.at[i]);
    float factor = rsqrtf(sum_of_warp(squares) + 1e-6F);
    if (warp == 0) factor *= rsqrtf(static_cast<float>(kDim));
    auto* const to = warp == 0 ? shared.query : shared.key;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) to[lane * kOfLane + i] = widen(read.at[i]) * factor;
  }
  const float x =
      widen(static_cast<const Bf16*>(step.alpha)[row * step.heads + head]) + step.dt_bias[head];
  const float softplus = x > 20 ? x : log1pf(::expf(x));
  const float decay = ::expf(-::expf(step.a_log[head]) * softplus);
  const float beta = rounded<Bf16>(
      1.0F / (1.0F + ::expf(-widen(static_cast<const Bf16*>(step.beta)[row * step.heads + head]))));
  const auto value = load<kOfLane>(values + lane * kOfLane);
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
  const float4 delta{(widen(value.at[0]) - of_key.x) * beta, (widen(value.at[1]) - of_key.y) * beta,
                     (widen(value.at[2]) - of_key.z) * beta,
                     (widen(value.at[3]) - of_key.w) * beta};
  float4 result{};
#pragma unroll
  for (int i = 0; i < kKeysOfWarp; ++i) {
    const float key = shared.key[warp * kKeysOfWarp + i];
    const float query = shared.query[warp * kKeysOfWarp + i];
    auto& one = held[i];
    one = {__fmaf_rn(key, delta.x, one.x), __fmaf_rn(key, delta.y, one.y),
           __fmaf_rn(key, delta.z, one.z), __fmaf_rn(key, delta.w, one.w)};
    state[i * kLanes + lane] = one;
    result = {__fmaf_rn(one.x, query, result.x), __fmaf_rn(one.y, query, result.y),
              __fmaf_rn(one.z, query, result.z), __fmaf_rn(one.w, query, result.w)};
  }
  result = sum_of_block(shared, result, warp, lane);
  if (warp != 0) return;

  // The norm with its gate, with the roundings of gated_rms_norm().
  float out[kOfLane] = {rounded<Bf16>(result.x), rounded<Bf16>(result.y), rounded<Bf16>(result.z),
                        rounded<Bf16>(result.w)};
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) squares += out[i] * out[i];
  const float inverse = rsqrtf(sum_of_warp(squares) / kDim + step.epsilon);
  const std::int64_t at = (row * step.heads + head) * kDim + lane * kOfLane;
  const auto gates = load<kOfLane>(static_cast<const Bf16*>(step.gate) + at);
  Vector<Bf16, kOfLane> y;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    const float weight = rounded<Bf16>(step.norm[lane * kOfLane + i] + 1.0F);
    const float normed = rounded<Bf16>(weight * rounded<Bf16>(out[i] * inverse));
    y.at[i] = narrow<Bf16>(normed * silu(widen(gates.at[i])));
  }
  store(static_cast<Bf16*>(step.output) + at, y);
}

}  // namespace

cudaError_t delta_step(const DeltaStep& step, cudaStream_t stream) {
  if (step.sequences == 0) return cudaSuccess;
  constexpr int kThreads = 256;
  const int channels = (2 * step.key_heads + step.heads) * kDim;
  const dim3 blocks(static_cast<unsigned>(ceil_div(channels, kThreads)),
                    static_cast<unsigned>(step.sequences));
  const auto run = [&](auto taps) {
    return launch_dependent(convolve<taps.value>, blocks, kThreads, 0, stream, step, channels);
  };
  const auto status = step.taps == 2   ? run(std::integral_constant<int, 2>{})
                      : step.taps == 3 ? run(std::integral_constant<int, 3>{})
                      : step.taps == 4 ? run(std::integral_constant<int, 4>{})
                                       : cudaErrorInvalidValue;
  if (status != cudaSuccess) return status;
  return launch_dependent(
      recur, dim3(static_cast<unsigned>(step.heads), static_cast<unsigned>(step.sequences)),
      kWarps * kLanes, 0, stream, step);
}

}  // namespace ferry::models::launch
