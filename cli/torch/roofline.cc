#include "cli/torch/roofline.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <functional>

#include "models/device/device.h"
#include "rollout/kv_cache.h"

namespace ferry::cli {
namespace {

// Times several calls and returns the best.
double seconds_of(c10::Device device, const std::function<void()>& body) {
  double best = 1e30;
  for (int round = 0; round < 6; ++round) {
    models::synchronize(device);
    const auto begin = std::chrono::steady_clock::now();
    body();
    models::synchronize(device);
    best = std::min(
        best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return best;
}

}  // namespace

DeviceRates measure_rates(c10::Device device, distckpt::DType dtype) {
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

Roofline::Roofline(const models::GPTModel& model, DeviceRates rates)
    : rates_(rates), item_bytes_(model.options().dtype == distckpt::DType::kF32 ? 4 : 2) {
  const auto& config = model.config();
  const bool tied = !config.untie_embeddings_and_output_weights;
  for (const auto& parameter : model.parameters().all()) {
    const auto& key = parameter.spec.key;
    const auto bytes = static_cast<double>(parameter.value.nbytes());
    if (key.starts_with("mtp.")) continue;
    if (key == "output_layer.weight" || (tied && key == "embedding.word_embeddings.weight")) {
      head_bytes_ += bytes;
    } else if (parameter.spec.expert) {
      expert_bytes_ += bytes;
    } else if (key != "embedding.word_embeddings.weight") {
      dense_bytes_ += bytes;
    }
  }
  if (config.num_moe_experts > 0)
    experts_of_row_ = static_cast<double>(config.moe_router_topk * model.mesh().shape().ep()) /
                      static_cast<double>(config.num_moe_experts);
  key_bytes_ = static_cast<double>(rollout::KVCache::bytes_per_block(model)) /
               static_cast<double>(rollout::KVCache::kBlockSize);
}

double Roofline::seconds(const StepWork& work) const {
  if (work.rows == 0) return 0;
  const auto rows = static_cast<double>(work.rows), drawn = static_cast<double>(work.drawn);
  const double bytes = dense_bytes_ + expert_bytes_ * std::min(1.0, rows * experts_of_row_) +
                       (work.drawn > 0 ? head_bytes_ : 0) +
                       key_bytes_ * static_cast<double>(work.cached_keys);
  const double flops =
      2 / item_bytes_ *
      (rows * (dense_bytes_ + expert_bytes_ * experts_of_row_) + drawn * head_bytes_);
  return std::max(bytes / rates_.bytes_per_second, flops / rates_.flops_per_second);
}

}  // namespace ferry::cli
