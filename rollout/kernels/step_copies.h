// What goes to a GPU before a step and comes from there after it, by kernels that read and write
// the host's pinned memory: few bytes, for which a copy of the driver's would have the stream wait
// for the GPU's copy engine and come back.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace ferry::rollout {

// The first `bytes` of `host`, rounded up to 16, to `device`, both aligned so. They begin with
// `num_tokens` of int64: in the place of one below 0, -1 - i, goes drawn[i] (int64, on the GPU).
void upload_step(const at::Tensor& host,
                 const at::Tensor& device,
                 std::int64_t bytes,
                 std::int64_t num_tokens,
                 const at::Tensor& drawn);

// Each [rows], on the GPU, to the beginning of what the host has for it: tokens int64, the others
// fp32.
struct DrawnNumbers {
  at::Tensor tokens{};
  at::Tensor logprobs{};
  at::Tensor processed_logprobs{};
};
void download_step(const DrawnNumbers& device, const DrawnNumbers& host);

}  // namespace ferry::rollout
