#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "distckpt/base/integers.h"
#include "trainer/optimizer/kernels/adam_launch.h"

namespace ferry::trainer::launch {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kAtOnce = 4;           // elements of a thread
constexpr std::int64_t kSumAtOnce = 1 << 16;  // of a block

__device__ float widen(float x) {
  return x;
}
__device__ float widen(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
__device__ float widen(__half x) {
  return __half2float(x);
}
__device__ void narrow(float x, float* y) {
  *y = x;
}
__device__ void narrow(float x, __nv_bfloat16* y) {
  *y = __float2bfloat16_rn(x);
}
__device__ void narrow(float x, __half* y) {
  *y = __float2half_rn(x);
}

template <typename T>
struct alignas(kAtOnce * sizeof(T)) Four {
  T value[kAtOnce];
};

template <typename T>
__device__ Four<float> widen(const Four<T>& x) {
  Four<float> wide;
  for (int k = 0; k < kAtOnce; ++k) wide.value[k] = widen(x.value[k]);
  return wide;
}

// Four elements of a moment: all threads of a launch have the same dtype.
__device__ Four<float> load_moment(const void* moment, bool bf16, std::int64_t i) {
  return bf16 ? widen(static_cast<const Four<__nv_bfloat16>*>(moment)[i])
              : static_cast<const Four<float>*>(moment)[i];
}
__device__ void store_moment(const Four<float>& x, void* moment, bool bf16, std::int64_t i) {
  if (!bf16) {
    static_cast<Four<float>*>(moment)[i] = x;
    return;
  }
  Four<__nv_bfloat16> rounded;
  for (int k = 0; k < kAtOnce; ++k) narrow(x.value[k], &rounded.value[k]);
  static_cast<Four<__nv_bfloat16>*>(moment)[i] = rounded;
}

template <typename Grad, typename Param>
__global__ void update(AdamPointers at, std::int64_t fours, AdamFactors factors) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < fours;
       i += step) {
    const auto grad = static_cast<const Four<Grad>*>(at.grad)[i];
    auto master = reinterpret_cast<Four<float>*>(at.master)[i];
    auto exp_avg = load_moment(at.exp_avg, at.exp_avg_bf16, i);
    auto exp_avg_sq = load_moment(at.exp_avg_sq, at.exp_avg_sq_bf16, i);
    const bool decays = at.decays[i * kAtOnce / 64] != 0;
    Four<Param> param;
    for (int k = 0; k < kAtOnce; ++k) {
      const auto now = adam_element({master.value[k], exp_avg.value[k], exp_avg_sq.value[k]},
                                    widen(grad.value[k]), decays, factors,
                                    [](float x) { return __fsqrt_rn(x); });
      master.value[k] = now.param;
      exp_avg.value[k] = now.exp_avg;
      exp_avg_sq.value[k] = now.exp_avg_sq;
      narrow(now.param, &param.value[k]);
    }
    reinterpret_cast<Four<float>*>(at.master)[i] = master;
    store_moment(exp_avg, at.exp_avg, at.exp_avg_bf16, i);
    store_moment(exp_avg_sq, at.exp_avg_sq, at.exp_avg_sq_bf16, i);
    if (at.param != nullptr) static_cast<Four<Param>*>(at.param)[i] = param;
  }
}

template <typename T>
__global__ void sum_squares(const T* x, std::int64_t elements, double* partial) {
  __shared__ double sums[kThreads];
  const std::int64_t begin = blockIdx.x * kSumAtOnce;
  const std::int64_t end = begin + kSumAtOnce < elements ? begin + kSumAtOnce : elements;
  double sum = 0;
  for (std::int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    const double value = widen(x[i]);
    sum += value * value;
  }
  sums[threadIdx.x] = sum;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) partial[blockIdx.x] = sums[0];
}

// Calls `launch` with a null pointer of the element's type.
template <typename Launch>
void by_type(AdamElementType type, const Launch& launch) {
  if (type == AdamElementType::kFloat)
    launch(static_cast<float*>(nullptr));
  else if (type == AdamElementType::kBf16)
    launch(static_cast<__nv_bfloat16*>(nullptr));
  else
    launch(static_cast<__half*>(nullptr));
}

}  // namespace

cudaError_t adam(const AdamPointers& at,
                 std::int64_t elements,
                 AdamElementType grad,
                 AdamElementType param,
                 const AdamFactors& factors,
                 cudaStream_t stream) {
  const std::int64_t fours = elements / kAtOnce;
  const std::int64_t needed = distckpt::ceil_div(fours, kThreads);
  const auto blocks = static_cast<unsigned>(needed < 132 * 16 ? needed : 132 * 16);
  by_type(grad, [&](auto* of_grad) {
    by_type(param, [&](auto* of_param) {
      using Grad = std::remove_pointer_t<decltype(of_grad)>;
      using Param = std::remove_pointer_t<decltype(of_param)>;
      update<Grad, Param><<<blocks, kThreads, 0, stream>>>(at, fours, factors);
    });
  });
  return cudaGetLastError();
}

std::int64_t squared_sum_partials(std::int64_t elements) {
  return distckpt::ceil_div(elements, kSumAtOnce);
}

cudaError_t squared_sum(const void* x,
                        std::int64_t elements,
                        AdamElementType element,
                        double* partial,
                        cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(squared_sum_partials(elements));
  by_type(element, [&](auto* none) {
    using T = std::remove_pointer_t<decltype(none)>;
    sum_squares<<<blocks, kThreads, 0, stream>>>(static_cast<const T*>(x), elements, partial);
  });
  return cudaGetLastError();
}

}  // namespace ferry::trainer::launch
