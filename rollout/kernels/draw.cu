#include <cuda_bf16.h>

#include <algorithm>

#include "distckpt/base/integers.h"
#include "rollout/kernels/draw_launch.h"

// The steps of rollout/sampler.h. What is reduced over threads are maxima and sums of integers,
// whose order does not matter: so the tokens are those of draw_host.cc.
namespace ferry::rollout::launch {
namespace {

__device__ float logit_of(const float* row, std::int64_t token) {
  return usable(row[token]);
}
__device__ float logit_of(const __nv_bfloat16* row, std::int64_t token) {
  return usable(__bfloat162float(row[token]));
}

struct Largest {
  __device__ std::uint64_t operator()(std::uint64_t a, std::uint64_t b) const {
    return a > b ? a : b;
  }
};
struct Sum {
  __device__ std::uint64_t operator()(std::uint64_t a, std::uint64_t b) const { return a + b; }
};

constexpr int kLanes = 32;

template <typename Combine>
__device__ std::uint64_t over_warp(std::uint64_t value, Combine combine) {
  for (int distance = kLanes / 2; distance > 0; distance /= 2)
    value = combine(value, __shfl_xor_sync(0xffffffffu, value, distance));
  return value;
}

template <int kThreads, typename Combine>
__device__ std::uint64_t over_block(std::uint64_t value, Combine combine) {
  __shared__ std::uint64_t of_warps[kThreads / kLanes];
  value = over_warp(value, combine);
  __syncthreads();  // the last results have been read
  if (threadIdx.x % kLanes == 0) of_warps[threadIdx.x / kLanes] = value;
  __syncthreads();
  value = of_warps[0];
  for (int warp = 1; warp < kThreads / kLanes; ++warp) value = combine(value, of_warps[warp]);
  return value;
}

// Four neighbouring tokens share a counter: their noise costs one call of Philox.
struct Best {
  float sum = kMinusInfinity;
  std::uint64_t key = 0;

  template <typename Value>  // token -> z, or -inf of those that are left out
  __device__ void visit(const DrawRow& row, std::uint32_t quad, std::int64_t end, Value value) {
    float z[4];
    float largest = kMinusInfinity;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const auto token = std::int64_t{quad} * 4 + k;
      z[k] = token < end ? value(token) : kMinusInfinity;
      largest = fmaxf(largest, z[k]);
    }
    if (key != 0 && largest + (row.greedy ? 0 : kMostNoise) < sum) return;
    PhiloxCounter random{};
    if (!row.greedy) random = philox(draw_counter(row.request, row.position, quad), row.seed);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const auto token = std::int64_t{quad} * 4 + k;
      if (token >= end) break;
      const float noisy = row.greedy ? z[k] : z[k] + gumbel_noise(random.at[k]);
      const auto candidate = rank_key(noisy, token);
      if (candidate <= key) continue;
      key = candidate;
      sum = noisy;
    }
  }
};

constexpr int kPlainThreads = 256;
constexpr std::int64_t kMostQuadsOfThread = 8;  // fewer where rows are
constexpr std::int64_t kEnoughBlocks = std::int64_t{132} * 8;

// A grid of [parts of a row, rows].
template <typename T>
__global__ void __launch_bounds__(kPlainThreads)
    draw_plain_rows(DrawTensors tensors, DrawRow* rows) {
  const auto row = rows[blockIdx.y];
  const T* logits = static_cast<const T*>(tensors.logits) + row.row * tensors.row_stride;
  const auto quads = static_cast<std::uint32_t>(distckpt::ceil_div(tensors.vocab_size, 4));
  Best mine;
  for (std::uint32_t quad = blockIdx.x * kPlainThreads + threadIdx.x; quad < quads;
       quad += gridDim.x * kPlainThreads)
    mine.visit(row, quad, tensors.vocab_size, [&](std::int64_t token) {
      return logit_of(logits, token) * row.inverse_temperature;
    });
  const auto of_block = over_block<kPlainThreads>(mine.key, Largest{});
  if (threadIdx.x != 0) return;
  auto* const best = reinterpret_cast<unsigned long long*>(&rows[blockIdx.y].best);
  atomicMax(best, static_cast<unsigned long long>(of_block));
  __threadfence();
  if (atomicAdd(&rows[blockIdx.y].arrived, 1U) + 1 < gridDim.x) return;
  __threadfence();
  tensors.tokens[row.row] = token_of_key(atomicMax(best, 0ULL));
}

constexpr int kThreads = 512;  // a warp for each digit
constexpr int kDigits = 16;
constexpr int kDigitBits = 4;
constexpr std::size_t kBinBytes = std::size_t{kDigits} * kThreads * sizeof(std::uint64_t);

// A shaped row, and what of it is kept.
struct Shaped {
  const float* z;  // [size]
  std::int64_t size;
  float maximum;
  std::uint64_t least;   // mass
  std::uint64_t cutoff;  // key
  std::uint64_t* bins;   // [kDigits, kThreads], shared

  __device__ std::uint64_t mass(float value) const {
    return mass_of(below_maximum(value, maximum));
  }
  __device__ bool keeps(std::int64_t token) const {
    return rank_key(z[token], token) >= cutoff && mass(z[token]) >= least;
  }

  // Sum of `amount` (z -> integer) over the kept tokens.
  template <typename Amount>
  __device__ std::uint64_t total(Amount amount) const {
    std::uint64_t sum = 0;
    for (std::int64_t token = threadIdx.x; token < size; token += kThreads)
      if (keeps(token)) sum += amount(z[token]);
    return over_block<kThreads>(sum, Sum{});
  }

  // The key of the kept token, from the largest on, with which `amount` sums up to `limit`: digit
  // after digit, each found in a histogram. Without bits below `last_shift`. 0: they do not reach.
  template <typename Amount>
  __device__ std::uint64_t reaching(std::uint64_t limit, int last_shift, Amount amount) const {
    __shared__ std::uint64_t of_digits[kDigits];
    constexpr std::uint64_t kSameOfAll = 0xFFF00000;  // bits of the id, which is below 2^20
    std::uint64_t chosen = 0;
    std::uint64_t before = 0;
    for (int shift = 64 - kDigitBits; shift >= last_shift; shift -= kDigitBits) {
      if (shift == 28) {
        chosen |= kSameOfAll;
        shift = 16;
      }
      for (int digit = 0; digit < kDigits; ++digit) bins[digit * kThreads + threadIdx.x] = 0;
      const auto above = shift + kDigitBits == 64 ? 0 : ~std::uint64_t{0} << (shift + kDigitBits);
      for (std::int64_t token = threadIdx.x; token < size; token += kThreads) {
        const auto key = rank_key(z[token], token);
        if (((key ^ chosen) & above) != 0 || !keeps(token)) continue;
        bins[(key >> shift) % kDigits * kThreads + threadIdx.x] += amount(z[token]);
      }
      __syncthreads();
      const int warp = static_cast<int>(threadIdx.x) / kLanes;
      std::uint64_t sum = 0;
      for (int i = static_cast<int>(threadIdx.x) % kLanes; i < kThreads; i += kLanes)
        sum += bins[warp * kThreads + i];
      sum = over_warp(sum, Sum{});
      if (threadIdx.x % kLanes == 0) of_digits[warp] = sum;
      __syncthreads();
      int digit = kDigits - 1;
      while (digit >= 0 && before + of_digits[digit] < limit) before += of_digits[digit--];
      if (digit < 0) return 0;  // in the first pass, or never
      chosen |= static_cast<std::uint64_t>(digit) << shift;
      __syncthreads();  // of_digits has been read
    }
    return chosen;
  }
};

template <typename T>
__device__ void write_z(
    const T* logits, const DrawRow& row, const LogitChange* changes, float* z, std::int64_t size) {
  for (std::int64_t token = threadIdx.x; token < size; token += kThreads)
    z[token] = logit_of(logits, token) * row.inverse_temperature;
  __syncthreads();
  for (std::int64_t i = threadIdx.x; i < row.num_changes; i += kThreads) {
    const auto change = changes[row.first_change + i];
    z[change.token] =
        change(logit_of(logits, change.token), row.penalties) * row.inverse_temperature;
  }
  __syncthreads();
}

// A block for each row.
template <typename T>
__global__ void __launch_bounds__(kThreads) draw_shaped_rows(DrawTensors tensors,
                                                             const DrawRow* rows,
                                                             const LogitChange* changes,
                                                             float* all_z) {
  extern __shared__ std::uint64_t bins[];
  const auto row = rows[blockIdx.x];
  const auto size = tensors.vocab_size;
  float* z = all_z + blockIdx.x * size;
  write_z(static_cast<const T*>(tensors.logits) + row.row * tensors.row_stride, row, changes, z,
          size);

  std::uint64_t largest = 0;
  for (std::int64_t token = threadIdx.x; token < size; token += kThreads)
    largest = max(largest, rank_key(z[token], token));
  largest = over_block<kThreads>(largest, Largest{});
  Shaped shaped{.z = z,
                .size = size,
                .maximum = z[token_of_key(largest)],
                .least = least_mass(row.min_p),
                .cutoff = 0,
                .bins = bins};
  const auto mass = [&](float value) { return shaped.mass(value); };
  if (row.top_k > 0)
    shaped.cutoff = shaped.reaching(static_cast<std::uint64_t>(row.top_k), 32,
                                    [](float) { return std::uint64_t{1}; });
  if (row.top_p < 1) {
    const auto limit = mass_limit(row.top_p, shaped.total(mass));
    const auto last = shaped.reaching(limit, 0, mass);
    shaped.cutoff = max(shaped.cutoff, last);
  }

  Best mine;
  const auto quads = static_cast<std::uint32_t>(distckpt::ceil_div(size, 4));
  for (std::uint32_t quad = threadIdx.x; quad < quads; quad += kThreads)
    mine.visit(row, quad, size,
               [&](std::int64_t token) { return shaped.keeps(token) ? z[token] : kMinusInfinity; });
  const auto token = token_of_key(over_block<kThreads>(mine.key, Largest{}));
  const auto total = shaped.total(mass);
  if (tensors.kept != nullptr) {
    bool* const kept = tensors.kept + blockIdx.x * size;
    for (std::int64_t id = threadIdx.x; id < size; id += kThreads)
      kept[id] = shaped.keeps(id) && z[id] > kMinusInfinity;
  }
  if (threadIdx.x != 0) return;
  tensors.tokens[row.row] = token;
  tensors.processed_logprobs[row.row] =
      processed_log_prob(below_maximum(z[token], shaped.maximum), total);
}

// Calls `launch` with a null pointer of the logits' type.
template <typename Launch>
cudaError_t by_type(const DrawTensors& tensors, const Launch& launch) {
  if (tensors.is_float)
    launch(static_cast<float*>(nullptr));
  else
    launch(static_cast<__nv_bfloat16*>(nullptr));
  return cudaGetLastError();
}

}  // namespace

cudaError_t draw_plain(const DrawTensors& tensors,
                       DrawRow* rows,
                       std::int64_t count,
                       cudaStream_t stream) {
  const auto blocks_for = [&](std::int64_t quads_of_thread) {
    const auto of_block = 4 * quads_of_thread * kPlainThreads;
    return distckpt::ceil_div(tensors.vocab_size, of_block);
  };
  const auto blocks =
      std::clamp(kEnoughBlocks / count, blocks_for(kMostQuadsOfThread), blocks_for(1));
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(count));
  return by_type(tensors, [&](auto* none) {
    draw_plain_rows<std::remove_pointer_t<decltype(none)>>
        <<<grid, kPlainThreads, 0, stream>>>(tensors, rows);
  });
}

cudaError_t draw_shaped(const DrawTensors& tensors,
                        const DrawRow* rows,
                        std::int64_t count,
                        const LogitChange* changes,
                        float* z,
                        cudaStream_t stream) {
  cudaError_t allowed = cudaSuccess;
  const auto status = by_type(tensors, [&](auto* none) {
    const auto kernel = draw_shaped_rows<std::remove_pointer_t<decltype(none)>>;
    allowed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   static_cast<int>(kBinBytes));
    if (allowed == cudaSuccess)
      kernel<<<static_cast<unsigned>(count), kThreads, kBinBytes, stream>>>(tensors, rows, changes,
                                                                            z);
  });
  return allowed != cudaSuccess ? allowed : status;
}

}  // namespace ferry::rollout::launch
