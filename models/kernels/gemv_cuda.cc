#include "models/kernels/gemv_cuda.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "distckpt/error.h"
#include "models/kernels/cuda_launch.h"

namespace ferry::models {
namespace {

constexpr std::int64_t kMostRows = 4;
constexpr std::int64_t kVector = 8;
constexpr std::uintptr_t kAlignment = 16;

bool is_aligned(const at::Tensor& x) {
  return reinterpret_cast<std::uintptr_t>(x.const_data_ptr()) % kAlignment == 0;
}

}  // namespace

bool gemv_cuda_supports(const at::Tensor& x, const at::Tensor& weight) {
  return x.is_cuda() && x.scalar_type() == at::kBFloat16 && weight.scalar_type() == at::kBFloat16 &&
         x.size(0) > 0 && x.size(0) <= kMostRows && x.size(1) % kVector == 0 && x.is_contiguous() &&
         weight.is_contiguous() && is_aligned(x) && is_aligned(weight);
}

at::Tensor gemv_cuda(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  require(gemv_cuda_supports(x, weight) && x.size(1) == weight.size(1), ErrorKind::kBug,
          "product of [{}, {}] by [{}, {}] is not of few rows in bf16", x.size(0), x.size(1),
          weight.size(0), weight.size(1));
  const c10::cuda::CUDAGuard device(x.device());
  auto y = at::empty({x.size(0), weight.size(0)}, x.options());
  const auto status = launch::gemv(
      x.const_data_ptr(), weight.const_data_ptr(), bias.defined() ? bias.const_data_ptr() : nullptr,
      y.mutable_data_ptr(), {.m = x.size(0), .n = weight.size(0), .k = weight.size(1)},
      c10::cuda::getCurrentCUDAStream().stream());
  require(status == cudaSuccess, ErrorKind::kDevice, "CUDA: {}", cudaGetErrorString(status));
  return y;
}

}  // namespace ferry::models
