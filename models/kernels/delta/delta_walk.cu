#include "models/kernels/delta/delta_tokens.cuh"

namespace ferry::models::launch {
namespace {

constexpr int kRowsOfTile = 16;
constexpr int kThreads = 256;

// A block of the first and the last kernel has a tile of a sequence's rows.
struct Tile {
  __device__ Tile(const DeltaWalk& walk, unsigned tile, unsigned sequence)
      : first(static_cast<std::int64_t>(tile) * kRowsOfTile),
        end(min(first + kRowsOfTile, walk.counts[sequence])),
        begin(walk.tokens.rows[sequence]) {}

  std::int64_t first, end;  // of the sequence's rows
  std::int64_t begin;       // the row of its first one
};

// A thread walks along a tile of a channel's rows.
template <int kTaps>
__global__ void convolve(DeltaWalk walk, int channels) {
  release_dependents();
  wait_for_inputs();
  const auto& all = walk.tokens;
  const Tile tile(walk, blockIdx.y, blockIdx.z);
  const int channel = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (channel >= channels || tile.first >= tile.end) return;
  const auto* const mixed = static_cast<const Bf16*>(all.mixed) + tile.begin * channels + channel;
  auto* const output = static_cast<Bf16*>(all.convolved) + tile.begin * channels + channel;
  const auto* const before = static_cast<const Bf16*>(walk.before);
  const auto* const weight =
      static_cast<const Bf16*>(all.conv_weight) + static_cast<std::int64_t>(channel) * kTaps;
  Bf16 tokens[kTaps];
#pragma unroll
  for (int i = 0; i < kTaps - 1; ++i) {
    const std::int64_t row = tile.first + i - (kTaps - 1);
    const std::int64_t in_before = blockIdx.z * (kTaps - 1) + row + kTaps - 1;
    tokens[i] = row >= 0            ? mixed[row * channels]
                : before == nullptr ? narrow<Bf16>(0.0F)
                                    : before[in_before * channels + channel];
  }
  for (auto row = tile.first; row < tile.end; ++row) {
    tokens[kTaps - 1] = mixed[row * channels];
    output[row * channels] = convolved<kTaps>(tokens, weight);
#pragma unroll
    for (int i = 0; i + 1 < kTaps; ++i) tokens[i] = tokens[i + 1];
  }
}

// The numbers that queries and keys are normed with, decays and betas of a tile of rows.
__global__ void __launch_bounds__(kThreads) prepare(DeltaWalk walk) {
  release_dependents();
  wait_for_inputs();
  const auto& all = walk.tokens;
  const Tile tile(walk, blockIdx.x, blockIdx.y);
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int sides = 2 * all.key_heads;  // queries, then keys
  const std::int64_t channels = static_cast<std::int64_t>(sides + all.heads) * kDim;
  const int rows = static_cast<int>(max(tile.end - tile.first, std::int64_t{0}));
  for (int i = static_cast<int>(threadIdx.x) / kLanes; i < rows * sides; i += kThreads / kLanes) {
    const std::int64_t row = tile.begin + tile.first + i / sides;
    const int side = i % sides;
    const auto read = load<kOfLane>(static_cast<const Bf16*>(all.convolved) + row * channels +
                                    side * kDim + lane * kOfLane);
    const float factor = side < all.key_heads ? query_factor(read) : key_factor(read);
    if (lane == 0) walk.factors[row * sides + side] = factor;
  }
  for (int i = static_cast<int>(threadIdx.x); i < rows * all.heads; i += kThreads) {
    const std::int64_t row = tile.begin + tile.first + i / all.heads;
    const int head = i % all.heads;
    reinterpret_cast<float2*>(walk.decays_and_betas)[row * all.heads + head] =
        decay_and_beta(all, row, head);
  }
}

// The numbers of a token that a lane reads.
struct LaneInputs {
  Vector<Bf16, kOfLane> query;
  Vector<Bf16, kOfLane> key;
  float query_factor;
  float key_factor;
  float2 decay_and_beta;
  Bf16 value;
};

constexpr int kChannelsOfWarp = kLanes / kChains;
constexpr int kWarpsOfHead = kDim / kChannelsOfWarp;
constexpr int kPadded = kKeysOfChain + 4;  // chains begin at other banks
struct WalkShared {
  float query[2][kChains][kPadded];  // of tokens with even and odd numbers
  float key[2][kChains][kPadded];
};

// The sum of what the lanes of a channel have, in the order of the chains.
__device__ float sum_of_chains(float of_chain, int of_channel) {
  float total = 0;
#pragma unroll
  for (int chain = 0; chain < kChains; ++chain)
    total += __shfl_sync(kAllLanes, of_chain, chain * kChannelsOfWarp + of_channel);
  return total;
}

// A warp has a few value channels of one head of one sequence, each lane the state of a channel for
// the keys of a chain, and walks along the sequence's tokens. Writes results before their norm.
__global__ void __launch_bounds__(kLanes) recur(DeltaWalk walk) {
  __shared__ __align__(16) WalkShared shared;
  release_dependents();
  wait_for_inputs();
  const auto& all = walk.tokens;
  const int lane = static_cast<int>(threadIdx.x);
  const int chain = lane / kChannelsOfWarp;
  const int of_channel = lane % kChannelsOfWarp;
  const int head = static_cast<int>(blockIdx.x) / kWarpsOfHead;
  const int channel = static_cast<int>(blockIdx.x) % kWarpsOfHead * kChannelsOfWarp + of_channel;
  const int key_head = head / (all.heads / all.key_heads);
  const std::int64_t channels = static_cast<std::int64_t>(2 * all.key_heads + all.heads) * kDim;
  const std::int64_t begin = all.rows[blockIdx.y];
  const std::int64_t count = walk.counts[blockIdx.y];
  float* state = nullptr;
  float held[kKeysOfChain]{};
  if (all.states != nullptr) {
    state = all.states +
            ((all.slots[blockIdx.y] * all.heads + head) * kDim + chain * kKeysOfChain) * kDim +
            channel;
#pragma unroll
    for (int i = 0; i < kKeysOfChain; ++i) held[i] = state[i * kDim];
  }

  const auto* const queries =
      static_cast<const Bf16*>(all.convolved) + key_head * kDim + lane * kOfLane;
  const auto* const keys = queries + all.key_heads * kDim;
  const auto* const values =
      static_cast<const Bf16*>(all.convolved) + (2 * all.key_heads + head) * kDim + channel;
  const auto read = [&](std::int64_t row) {
    const auto* const factors = walk.factors + row * 2 * all.key_heads + key_head;
    return LaneInputs{.query = load<kOfLane>(queries + row * channels),
                      .key = load<kOfLane>(keys + row * channels),
                      .query_factor = factors[0],
                      .key_factor = factors[all.key_heads],
                      .decay_and_beta = reinterpret_cast<const float2*>(
                          walk.decays_and_betas)[row * all.heads + head],
                      .value = values[row * channels]};
  };
  const auto share = [&](float(&to)[kChains][kPadded], const Vector<Bf16, kOfLane>& of_lane,
                         float factor) {
    constexpr int kLanesOfChain = kKeysOfChain / kOfLane;
    *reinterpret_cast<float4*>(&to[lane / kLanesOfChain][lane % kLanesOfChain * kOfLane]) = {
        widen(of_lane.at[0]) * factor, widen(of_lane.at[1]) * factor, widen(of_lane.at[2]) * factor,
        widen(of_lane.at[3]) * factor};
  };
  const auto of_chain = [&](const float(&from)[kChains][kPadded], float(&to)[kKeysOfChain]) {
#pragma unroll
    for (int i = 0; i < kKeysOfChain; i += 4) {
      const auto four = *reinterpret_cast<const float4*>(&from[chain][i]);
      to[i] = four.x;
      to[i + 1] = four.y;
      to[i + 2] = four.z;
      to[i + 3] = four.w;
    }
  };
  LaneInputs next;
  if (count > 0) next = read(begin);
  for (std::int64_t token = 0; token < count; ++token) {
    const auto now = next;
    if (token + 1 < count) next = read(begin + token + 1);
    share(shared.query[token % 2], now.query, now.query_factor);
    share(shared.key[token % 2], now.key, now.key_factor);
    __syncwarp();
    float key[kKeysOfChain];
    float query[kKeysOfChain];
    of_chain(shared.key[token % 2], key);
    of_chain(shared.query[token % 2], query);
    const auto [decay, beta] = now.decay_and_beta;
    float of_key = 0;
#pragma unroll
    for (int i = 0; i < kKeysOfChain; ++i) {
      held[i] *= decay;
      of_key = __fmaf_rn(held[i], key[i], of_key);
    }
    const float delta = (widen(now.value) - sum_of_chains(of_key, of_channel)) * beta;
    float result = 0;
#pragma unroll
    for (int i = 0; i < kKeysOfChain; ++i) {
      held[i] = __fmaf_rn(key[i], delta, held[i]);
      result = __fmaf_rn(held[i], query[i], result);
    }
    result = sum_of_chains(result, of_channel);
    if (chain == 0)
      static_cast<Bf16*>(all.output)[((begin + token) * all.heads + head) * kDim + channel] =
          narrow<Bf16>(result);
  }
  if (state == nullptr) return;
#pragma unroll
  for (int i = 0; i < kKeysOfChain; ++i) state[i * kDim] = held[i];
}

__global__ void __launch_bounds__(kThreads) finish(DeltaWalk walk) {
  release_dependents();
  wait_for_inputs();
  const auto& all = walk.tokens;
  const Tile tile(walk, blockIdx.x, blockIdx.y);
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int rows = static_cast<int>(max(tile.end - tile.first, std::int64_t{0}));
  for (int i = static_cast<int>(threadIdx.x) / kLanes; i < rows * all.heads;
       i += kThreads / kLanes) {
    const std::int64_t row = tile.begin + tile.first + i / all.heads;
    const int head = i % all.heads;
    const auto read = load<kOfLane>(static_cast<const Bf16*>(all.output) +
                                    (row * all.heads + head) * kDim + lane * kOfLane);
    norm_and_gate(all, row, head, lane,
                  {widen(read.at[0]), widen(read.at[1]), widen(read.at[2]), widen(read.at[3])});
  }
}

}  // namespace

cudaError_t delta_walk(const DeltaWalk& walk, cudaStream_t stream) {
  const auto& tokens = walk.tokens;
  if (tokens.sequences == 0 || walk.most == 0) return cudaSuccess;
  const int channels = channels_of(tokens);
  const auto sequences = static_cast<unsigned>(tokens.sequences);
  const auto tiles = static_cast<unsigned>(ceil_div(walk.most, std::int64_t{kRowsOfTile}));
  auto status = with_taps(tokens.taps, [&](auto taps) {
    const dim3 blocks(static_cast<unsigned>(ceil_div(channels, kThreads)), tiles, sequences);
    return launch_dependent(convolve<taps.value>, blocks, kThreads, 0, stream, walk, channels);
  });
  if (status == cudaSuccess)
    status = launch_dependent(prepare, dim3(tiles, sequences), kThreads, 0, stream, walk);
  if (status == cudaSuccess)
    status =
        launch_dependent(recur, dim3(static_cast<unsigned>(tokens.heads * kWarpsOfHead), sequences),
                         kLanes, 0, stream, walk);
  if (status == cudaSuccess)
    status = launch_dependent(finish, dim3(tiles, sequences), kThreads, 0, stream, walk);
  return status;
}

}  // namespace ferry::models::launch
