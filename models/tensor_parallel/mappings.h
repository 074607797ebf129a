// Differentiable collectives, under the names of Megatron-Core's tensor_parallel/mappings.py. Rows
// are tokens: [tokens, ...].
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "models/distributed/process_group.h"

namespace ferry::models {

using Mapping = std::function<at::Tensor(const at::Tensor&)>;
// forward(x), a linear map whose gradient is backward(gradient).
at::Tensor mapped(const at::Tensor& x, const Mapping& forward, const Mapping& backward);

// Forward: nothing. Backward: sums the gradients of all ranks.
at::Tensor copy_to_tensor_model_parallel_region(const at::Tensor& x, const ProcessGroup& group);
// Forward: sums over the ranks. Backward: nothing.
at::Tensor reduce_from_tensor_model_parallel_region(const at::Tensor& x, const ProcessGroup& group);
// Forward: [n, channels/size] of each rank -> [n, channels]. Backward: this rank's channels, of the
// sum, or, where all ranks go on with the same computation (`replicated`), of its own gradient.
at::Tensor gather_from_tensor_model_parallel_region(const at::Tensor& x,
                                                    const ProcessGroup& group,
                                                    bool replicated = true);
// Forward: [n/size, ...] of each rank -> [n, ...]. Backward: this rank's rows, of the sum or, where
// all ranks go on with the same computation (`replicated`), of its own gradient.
at::Tensor gather_from_sequence_parallel_region(const at::Tensor& x,
                                                const ProcessGroup& group,
                                                bool replicated = false);
// Forward: this rank's rows. Backward: all rows.
at::Tensor scatter_to_sequence_parallel_region(const at::Tensor& x, const ProcessGroup& group);
// Forward: this rank's rows of the sum. Backward: all rows.
at::Tensor reduce_scatter_to_sequence_parallel_region(const at::Tensor& x,
                                                      const ProcessGroup& group);

// Forward and backward: all-to-all of rows. `send_rows`, `receive_rows` [size]: the number of rows
// to and from each rank; empty: equal parts.
at::Tensor all_to_all(const at::Tensor& x,
                      const ProcessGroup& group,
                      const std::vector<std::int64_t>& send_rows = {},
                      const std::vector<std::int64_t>& receive_rows = {});
// [n, channels] -> [n * size, channels/size]: gathers rows and scatters channels. Nothing is
// summed.
at::Tensor all_to_all_sequence_to_hidden(const at::Tensor& x, const ProcessGroup& group);
// [n, channels/size] -> [n/size, channels]: scatters rows and gathers channels. Nothing is summed.
at::Tensor all_to_all_hidden_to_sequence(const at::Tensor& x, const ProcessGroup& group);

}  // namespace ferry::models
