#include "cli/torch/device_rates.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <functional>

#include "distckpt/base/stopwatch.h"
#include "models/device/device.h"

namespace ferry::cli {
namespace {

// Times several calls and returns the best.
double seconds_of(c10::Device device, const std::function<void()>& body) {
  double best = 1e30;
  for (int round = 0; round < 6; ++round) {
    models::synchronize(device);
    const distckpt::Stopwatch stopwatch;
    body();
    models::synchronize(device);
    best = std::min(best, stopwatch.seconds());
  }
  return best;
}

}  // namespace

models::DeviceRates measure_rates(c10::Device device, distckpt::DType dtype) {
  const at::NoGradGuard no_grad;
  const auto options = at::TensorOptions().device(device);
  // Far more than any cache holds.
  const std::int64_t bytes = std::int64_t{device.is_cuda() ? 4096 : 256} << 20;
  const auto from = at::zeros({bytes / 4}, options.dtype(at::kFloat));
  auto to = at::empty_like(from);
  at::Tensor sum;
  const double read = seconds_of(device, [&] { sum = from.sum(); });
  const double copied = seconds_of(device, [&] { to.copy_(from); });
  const std::int64_t size = device.is_cuda() ? 8192 : 1024;
  const auto type = dtype == distckpt::DType::kF32 ? at::kFloat : at::kBFloat16;
  const auto a = at::randn({size, size}, options).to(type),
             b = at::randn({size, size}, options).to(type);
  auto product = at::empty({size, size}, options.dtype(type));
  const double multiplied = seconds_of(device, [&] { at::mm_out(product, a, b.t()); });
  const auto cube =
      static_cast<double>(size) * static_cast<double>(size) * static_cast<double>(size);
  return {.bytes_per_second = static_cast<double>(bytes) * std::max(1 / read, 2 / copied),
          .flops_per_second = 2 * cube / multiplied};
}

}  // namespace ferry::cli
