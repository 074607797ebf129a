#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAGuard.h>

#include "models/kernels/cuda/cuda_call.h"
#include "rollout/kernels/step_copies.h"
#include "rollout/kernels/step_copies_launch.h"

namespace ferry::rollout {

namespace {

// Makes the allocator wait for the stream before it hands freed pinned memory out again.
void keep(const at::Tensor& pinned) {
  at::getHostAllocator(at::kCUDA)->record_event(pinned.mutable_data_ptr(),
                                                pinned.storage().data_ptr().get_context(),
                                                c10::cuda::getCurrentCUDAStream().unwrap());
}

launch::DrawnPointers pointers_of(const DrawnNumbers& numbers) {
  return {.tokens = numbers.tokens.mutable_data_ptr<std::int64_t>(),
          .logprobs = numbers.logprobs.mutable_data_ptr<float>(),
          .processed_logprobs = numbers.processed_logprobs.mutable_data_ptr<float>()};
}

}  // namespace

void upload_step(const at::Tensor& host,
                 const at::Tensor& device,
                 std::int64_t bytes,
                 std::int64_t num_tokens,
                 const at::Tensor& drawn) {
  const c10::cuda::CUDAGuard guard(device.device());
  models::check(launch::upload_step(
      host.const_data_ptr(), device.mutable_data_ptr(), bytes, num_tokens,
      drawn.defined() ? drawn.const_data_ptr<std::int64_t>() : nullptr, models::stream()));
  keep(host);
}

void download_step(const DrawnNumbers& device, const DrawnNumbers& host) {
  const c10::cuda::CUDAGuard guard(device.tokens.device());
  models::check(launch::download_step(pointers_of(device), pointers_of(host), device.tokens.size(0),
                                      models::stream()));
  for (const auto& one : {host.tokens, host.logprobs, host.processed_logprobs}) keep(one);
}

}  // namespace ferry::rollout
