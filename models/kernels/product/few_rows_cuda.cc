#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>

#include <cstdint>

#include "models/kernels/cuda/cuda_call.h"
#include "models/kernels/cuda/cuda_launch.h"
#include "models/kernels/product/few_rows.h"

namespace ferry::models {
namespace {

constexpr std::int64_t kMostFewRows = 4;
constexpr std::int64_t kBytesAtOnce = 16;
// More rows keep ATen's products busy enough, unless a weight's rows have warps all at once
// (tests/bench/kernels/product_bench.cc).
constexpr std::int64_t kRowsOfAnyWeight = 2;
constexpr std::int64_t kMostRowsAtOnce = 3168;

bool taken(const at::Tensor& values) {
  return values.scalar_type() == at::kBFloat16 && values.is_contiguous() &&
         reinterpret_cast<std::uintptr_t>(values.const_data_ptr()) % kBytesAtOnce == 0;
}

at::Tensor run(launch::RowsProduct* product,
               const at::Tensor& x,
               const at::Tensor& weight,
               const at::Tensor& bias,
               at::ScalarType dtype) {
  const c10::cuda::CUDAGuard device(x.device());
  const auto more = bias.defined() ? bias.contiguous() : bias;
  auto y = at::empty({x.size(0), weight.size(0)}, x.options().dtype(dtype));
  check(product(x.const_data_ptr(), weight.const_data_ptr(),
                more.defined() ? more.const_data_ptr() : nullptr, y.mutable_data_ptr(), x.size(0),
                weight.size(0), weight.size(1), stream()));
  return y;
}

}  // namespace

bool few_rows_product_supported(const at::Tensor& x, const at::Tensor& weight) {
  return x.is_cuda() && x.dim() == 2 && x.size(0) >= 1 && x.size(0) <= kMostFewRows &&
         (x.size(0) <= kRowsOfAnyWeight || weight.size(0) <= kMostRowsAtOnce) &&
         weight.size(0) >= 1 && weight.size(1) * weight.element_size() % kBytesAtOnce == 0 &&
         taken(x) && taken(weight);
}

at::Tensor few_rows_product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  return run(launch::few_rows_product, x, weight, bias, at::kBFloat16);
}

at::Tensor few_rows_product_in_fp32(const at::Tensor& x, const at::Tensor& weight) {
  return run(launch::few_rows_product_in_fp32, x, weight, {}, at::kFloat);
}

}  // namespace ferry::models
