#include "trainer/optimizer/kernels/adam_cuda.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>

#include "distckpt/base/error.h"
#include "models/kernels/cuda/cuda_call.h"
#include "trainer/optimizer/kernels/adam_launch.h"

namespace ferry::trainer {

using models::check;
using models::stream;

namespace {

launch::AdamElementType type_of(const at::Tensor& x) {
  switch (x.scalar_type()) {
    case at::kFloat:
      return launch::AdamElementType::kFloat;
    case at::kBFloat16:
      return launch::AdamElementType::kBf16;
    case at::kHalf:
      return launch::AdamElementType::kHalf;
    default:
      throw Error(ErrorKind::kBug,
                  fmt::format("Adam does not run on {}", at::toString(x.scalar_type())));
  }
}

}  // namespace

void adam_update_cuda(const AdamTensors& t, const AdamFactors& factors) {
  const c10::cuda::CUDAGuard device(t.master.device());
  const launch::AdamPointers at{.grad = t.grad.const_data_ptr(),
                                .master = t.master.mutable_data_ptr<float>(),
                                .exp_avg = t.exp_avg.mutable_data_ptr(),
                                .exp_avg_sq = t.exp_avg_sq.mutable_data_ptr(),
                                .exp_avg_bf16 = t.exp_avg.scalar_type() == at::kBFloat16,
                                .exp_avg_sq_bf16 = t.exp_avg_sq.scalar_type() == at::kBFloat16,
                                .param = t.param.defined() ? t.param.mutable_data_ptr() : nullptr,
                                .decays = t.decays.const_data_ptr<std::uint8_t>()};
  check(launch::adam(at, t.master.numel(), type_of(t.grad),
                     t.param.defined() ? type_of(t.param) : launch::AdamElementType::kFloat,
                     factors, stream()));
}

at::Tensor squared_sum_cuda(const at::Tensor& x) {
  const c10::cuda::CUDAGuard device(x.device());
  auto partial =
      at::zeros({launch::squared_sum_partials(x.numel())}, x.options().dtype(at::kDouble));
  if (x.numel() > 0)
    check(launch::squared_sum(x.const_data_ptr(), x.numel(), type_of(x),
                              partial.mutable_data_ptr<double>(), stream()));
  return partial.sum().reshape({1});
}

}  // namespace ferry::trainer
