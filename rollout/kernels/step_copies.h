// Copies of a step's few inputs to the GPU and of its results back, by kernels that read and write
// the host's pinned memory: a copy by the driver would make the stream wait for the copy engine.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace ferry::rollout {

// Copies the first `bytes` of `host`, rounded up to 16, to `device`; both are aligned to 16. They
// begin with `num_tokens` of int64; a token below 0, -1 - i, is replaced by drawn[i] (int64, on the
// GPU).
void upload_step(const at::Tensor& host,
                 const at::Tensor& device,
                 std::int64_t bytes,
                 std::int64_t num_tokens,
                 const at::Tensor& drawn);

// tokens [rows], int64; the others [rows], fp32.
struct DrawnNumbers {
  at::Tensor tokens{};
  at::Tensor logprobs{};
  at::Tensor processed_logprobs{};
};
// Copies from the GPU to the beginning of the host's tensors, which may be longer.
void download_step(const DrawnNumbers& device, const DrawnNumbers& host);

}  // namespace ferry::rollout
