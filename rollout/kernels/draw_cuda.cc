#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>

#include <cstring>
#include <vector>

#include "distckpt/base/error.h"
#include "models/kernels/cuda/cuda_call.h"
#include "rollout/kernels/draw.h"
#include "rollout/kernels/draw_launch.h"

namespace ferry::rollout {

using models::check;

namespace {

// The items' bytes on the device. Does not wait for the copy.
template <typename Item>
at::Tensor upload(const std::vector<Item>& items, at::Device device) {
  const auto bytes = static_cast<std::int64_t>(items.size() * sizeof(Item));
  auto pinned = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
  if (bytes > 0)
    std::memcpy(pinned.mutable_data_ptr(), items.data(), static_cast<std::size_t>(bytes));
  return pinned.to(device, /*non_blocking=*/true);
}

template <typename Item>
Item* items_of(const at::Tensor& bytes) {
  return static_cast<Item*>(bytes.mutable_data_ptr());
}

}  // namespace

void draw_on_gpu(const at::Tensor& logits,
                 std::int64_t vocab_size,
                 const Draws& draws,
                 const DrawnRows& drawn) {
  const c10::cuda::CUDAGuard device(logits.device());
  const auto stream = models::stream();
  const launch::DrawTensors tensors{
      .logits = logits.const_data_ptr(),
      .is_float = logits.scalar_type() == at::kFloat,
      .row_stride = logits.size(1),
      .vocab_size = vocab_size,
      .tokens = drawn.tokens.mutable_data_ptr<std::int64_t>(),
      .processed_logprobs = drawn.processed_logprobs.mutable_data_ptr<float>(),
      .kept = drawn.kept.defined() ? drawn.kept.mutable_data_ptr<bool>() : nullptr};
  if (const auto count = static_cast<std::int64_t>(draws.plain.size()); count > 0) {
    const auto rows =
        draws.plain_on_gpu.defined() ? draws.plain_on_gpu : upload(draws.plain, logits.device());
    check(launch::draw_plain(tensors, items_of<DrawRow>(rows), count, stream));
  }
  if (const auto count = static_cast<std::int64_t>(draws.shaped.size()); count > 0) {
    const auto rows = upload(draws.shaped, logits.device());
    const auto changes = upload(draws.changes, logits.device());
    auto z = at::empty({count, vocab_size}, logits.options().dtype(at::kFloat));
    check(launch::draw_shaped(tensors, items_of<DrawRow>(rows), count,
                              items_of<LogitChange>(changes), z.mutable_data_ptr<float>(), stream));
  }
}

}  // namespace ferry::rollout
