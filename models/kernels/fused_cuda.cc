#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "distckpt/error.h"
#include "models/kernels/cuda_launch.h"
#include "models/kernels/rms_norm_cuda.h"
#include "models/kernels/rotary_cuda.h"
#include "models/kernels/swiglu_cuda.h"

namespace ferry::models {
namespace {

void check(cudaError_t status) {
  require(status == cudaSuccess, ErrorKind::kDevice, "CUDA: {}", cudaGetErrorString(status));
}

launch::Element element_of(const at::Tensor& x) {
  require(x.is_cuda() && (x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kFloat),
          ErrorKind::kBug, "this kernel takes bf16 or fp32 on a GPU");
  return x.scalar_type() == at::kFloat ? launch::Element::kFloat : launch::Element::kBf16;
}

cudaStream_t stream() {
  return c10::cuda::getCurrentCUDAStream().stream();
}

launch::RmsNormShape norm_shape(const at::Tensor& x, double epsilon) {
  const auto channels = x.size(-1);
  require(rms_norm_cuda_supports(channels), ErrorKind::kBug, "RMSNorm over {} channels", channels);
  return {
      .rows = x.numel() / channels, .channels = channels, .epsilon = static_cast<float>(epsilon)};
}

}  // namespace

bool rms_norm_cuda_supports(std::int64_t channels) {
  return channels > 0 && (channels % 4 == 0 || channels < 128) && channels <= 65536;
}

RmsNormResult rms_norm_cuda(const at::Tensor& x, const at::Tensor& weight, double epsilon) {
  const auto element = element_of(x);
  require(weight.scalar_type() == x.scalar_type() && weight.size(0) == x.size(-1), ErrorKind::kBug,
          "RMSNorm: weight of another type or size");
  const c10::cuda::CUDAGuard device(x.device());
  const auto shape = norm_shape(x, epsilon);
  const auto in = x.contiguous();
  RmsNormResult result{.y = at::empty_like(in),
                       .inverse_rms = at::empty({shape.rows}, x.options().dtype(at::kFloat))};
  if (shape.rows == 0) return result;
  check(launch::rms_norm(in.const_data_ptr(), weight.contiguous().const_data_ptr(),
                         result.y.mutable_data_ptr(), result.inverse_rms.mutable_data_ptr<float>(),
                         shape, element, stream()));
  return result;
}

std::pair<at::Tensor, at::Tensor> rms_norm_backward_cuda(const at::Tensor& grad_y,
                                                         const at::Tensor& x,
                                                         const at::Tensor& weight,
                                                         const at::Tensor& inverse_rms) {
  const auto element = element_of(x);
  const c10::cuda::CUDAGuard device(x.device());
  const auto shape = norm_shape(x, 0);
  const auto in = x.contiguous();
  auto grad_x = at::empty_like(in);
  auto partial = at::zeros({launch::rms_norm_partials(shape.rows), shape.channels},
                           x.options().dtype(at::kFloat));
  if (shape.rows > 0)
    check(launch::rms_norm_backward(grad_y.contiguous().const_data_ptr(), in.const_data_ptr(),
                                    weight.contiguous().const_data_ptr(),
                                    inverse_rms.const_data_ptr<float>(), grad_x.mutable_data_ptr(),
                                    partial.mutable_data_ptr<float>(), shape, element, stream()));
  return {grad_x, partial.sum(0).to(weight.scalar_type())};
}

at::Tensor rotary_cuda(const at::Tensor& x,
                       const at::Tensor& cos,
                       const at::Tensor& sin,
                       bool interleaved) {
  const auto element = element_of(x);
  const c10::cuda::CUDAGuard device(x.device());
  const auto in = x.stride(2) == 1 ? x : x.contiguous();
  auto y = at::empty({x.size(0), x.size(1), x.size(2)}, x.options());
  const launch::RotaryShape shape{.tokens = x.size(0),
                                  .heads = x.size(1),
                                  .dim = x.size(2),
                                  .token_stride = in.stride(0),
                                  .head_stride = in.stride(1),
                                  .interleaved = interleaved};
  if (x.numel() == 0) return y;
  check(launch::rotary(in.const_data_ptr(), cos.contiguous().const_data_ptr(),
                       sin.contiguous().const_data_ptr(), y.mutable_data_ptr(), shape, false,
                       element, stream()));
  return y;
}

at::Tensor rotary_backward_cuda(const at::Tensor& grad_y,
                                const at::Tensor& cos,
                                const at::Tensor& sin,
                                bool interleaved) {
  const auto element = element_of(grad_y);
  const c10::cuda::CUDAGuard device(grad_y.device());
  auto grad_x = at::empty({grad_y.size(0), grad_y.size(1), grad_y.size(2)}, grad_y.options());
  const launch::RotaryShape shape{.tokens = grad_y.size(0),
                                  .heads = grad_y.size(1),
                                  .dim = grad_y.size(2),
                                  .token_stride = grad_x.stride(0),
                                  .head_stride = grad_x.stride(1),
                                  .interleaved = interleaved};
  if (grad_y.numel() == 0) return grad_x;
  check(launch::rotary(grad_y.contiguous().const_data_ptr(), cos.contiguous().const_data_ptr(),
                       sin.contiguous().const_data_ptr(), grad_x.mutable_data_ptr(), shape, true,
                       element, stream()));
  return grad_x;
}

at::Tensor swiglu_cuda(const at::Tensor& gate_up) {
  const auto element = element_of(gate_up);
  const c10::cuda::CUDAGuard device(gate_up.device());
  const auto ffn = gate_up.size(1) / 2;
  auto y = at::empty({gate_up.size(0), ffn}, gate_up.options());
  if (y.numel() == 0) return y;
  check(launch::swiglu(gate_up.contiguous().const_data_ptr(), y.mutable_data_ptr(), gate_up.size(0),
                       ffn, element, stream()));
  return y;
}

at::Tensor swiglu_backward_cuda(const at::Tensor& grad_y, const at::Tensor& gate_up) {
  const auto element = element_of(gate_up);
  const c10::cuda::CUDAGuard device(gate_up.device());
  const auto in = gate_up.contiguous();
  auto grad = at::empty_like(in);
  if (grad.numel() == 0) return grad;
  check(launch::swiglu_backward(grad_y.contiguous().const_data_ptr(), in.const_data_ptr(),
                                grad.mutable_data_ptr(), in.size(0), in.size(1) / 2, element,
                                stream()));
  return grad;
}

}  // namespace ferry::models
