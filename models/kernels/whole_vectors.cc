#include "models/kernels/whole_vectors.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/log.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sigmoid_backward.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/softplus.h>
#include <ATen/ops/softplus_backward.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/tanh_backward.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cstdint>

#include "distckpt/base/integers.h"

namespace ferry::models {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr std::int64_t kAtOnce = 64;  // a multiple of what a loop of LibTorch takes, on any CPU
constexpr std::int64_t kOfAThread = 16384;  // fewer than LibTorch shares out among threads

template <typename Function>
at::Tensor by_whole_vectors(const at::Tensor& x, const Function& function) {
  const auto surplus = x.numel() % kAtOnce;
  auto flat = x.detach().contiguous().view({-1});
  if (surplus != 0) flat = at::constant_pad_nd(flat, {0, kAtOnce - surplus});
  const auto result = at::empty_like(flat);
  at::parallel_for(0, distckpt::ceil_div(flat.numel(), kOfAThread), 1,
                   [&](std::int64_t first, std::int64_t last) {
                     for (auto i = first; i < last; ++i) {
                       const auto begin = i * kOfAThread;
                       const auto count = std::min(kOfAThread, flat.numel() - begin);
                       auto part = result.narrow(0, begin, count);
                       function(part, flat.narrow(0, begin, count));
                     }
                   });
  return result.narrow(0, 0, x.numel()).view(x.sizes());
}

class HostSilu : public torch::autograd::Function<HostSilu> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    return by_whole_vectors(x,
                            [](at::Tensor& y, const at::Tensor& part) { at::silu_out(y, part); });
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    return {at::silu_backward(grads[0], context->get_saved_variables()[0])};
  }
};

class HostSigmoid : public torch::autograd::Function<HostSigmoid> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
    const auto y = by_whole_vectors(
        x, [](at::Tensor& out, const at::Tensor& part) { at::sigmoid_out(out, part); });
    context->save_for_backward({y});
    return y;
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    return {at::sigmoid_backward(grads[0], context->get_saved_variables()[0])};
  }
};

class HostTanh : public torch::autograd::Function<HostTanh> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
    const auto y = by_whole_vectors(
        x, [](at::Tensor& out, const at::Tensor& part) { at::tanh_out(out, part); });
    context->save_for_backward({y});
    return y;
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    return {at::tanh_backward(grads[0], context->get_saved_variables()[0])};
  }
};

constexpr auto* kByTanh = "tanh";

class HostGeluTanh : public torch::autograd::Function<HostGeluTanh> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    return by_whole_vectors(
        x, [](at::Tensor& y, const at::Tensor& part) { at::gelu_out(y, part, kByTanh); });
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    return {at::gelu_backward(grads[0], context->get_saved_variables()[0], kByTanh)};
  }
};

constexpr double kBeta = 1;        // of softplus
constexpr double kThreshold = 20;  // from which it is the identity

class HostSoftplus : public torch::autograd::Function<HostSoftplus> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    return by_whole_vectors(x, [](at::Tensor& y, const at::Tensor& part) {
      at::softplus_out(y, part, kBeta, kThreshold);
    });
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    return {at::softplus_backward(grads[0], context->get_saved_variables()[0], kBeta, kThreshold)};
  }
};

}  // namespace

at::Tensor silu(const at::Tensor& x) {
  return x.is_cpu() ? HostSilu::apply(x) : at::silu(x);
}

at::Tensor sigmoid(const at::Tensor& x) {
  return x.is_cpu() ? HostSigmoid::apply(x) : at::sigmoid(x);
}

at::Tensor gelu_tanh(const at::Tensor& x) {
  return x.is_cpu() ? HostGeluTanh::apply(x) : at::gelu(x, kByTanh);
}

at::Tensor tanh(const at::Tensor& x) {
  return x.is_cpu() ? HostTanh::apply(x) : at::tanh(x);
}

at::Tensor soft_capped(const at::Tensor& x, const std::optional<double>& c) {
  return c ? models::tanh(x / *c) * *c : x;
}

at::Tensor log(const at::Tensor& x) {
  if (!x.is_cpu()) return at::log(x);
  return by_whole_vectors(x, [](at::Tensor& y, const at::Tensor& part) { at::log_out(y, part); });
}

at::Tensor softplus(const at::Tensor& x) {
  return x.is_cpu() ? HostSoftplus::apply(x) : at::softplus(x, kBeta, kThreshold);
}

}  // namespace ferry::models
