// The gated delta rule on a GPU in bf16, for heads of 128 channels of keys and as many of values:
// products in bf16 with sums in fp32, states in fp32. In fixed orders.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

#include "models/kernels/delta/delta_rule.h"

namespace ferry::models {

bool delta_cuda_supports(const at::Tensor& rows, std::int64_t key_dim, std::int64_t value_dim);

// One token of each of several sequences, from the rows behind the projections to the normed and
// gated output.
struct DeltaStepRows {
  at::Tensor mixed{};        // [rows, channels]: query, key, value
  at::Tensor conv_weight{};  // [channels, 1, taps], at most 4 of them
  at::Tensor alpha{};        // [rows, heads]
  at::Tensor beta{};         // [rows, heads], before sigmoid
  at::Tensor a_log{};        // [heads]
  at::Tensor dt_bias{};      // [heads]
  at::Tensor gate{};         // [rows, heads * value_dim]
  at::Tensor norm{};         // [value_dim]: the weight less one
  double epsilon = 1e-6;
  std::int64_t key_heads = 0;
  at::Tensor rows{};   // [sequences], int64: the row of each
  at::Tensor slots{};  // [sequences], int64: its slot
};
// Moves the states on, conv [slots, taps - 1, channels] and recurrent [slots, heads, key_dim,
// value_dim], and writes the sequences' rows of output [rows, heads * value_dim]. Not
// differentiable; reads nothing back to the host.
void delta_step_cuda(const DeltaStepRows& rows,
                     const at::Tensor& conv,
                     const at::Tensor& recurrent,
                     const at::Tensor& output);

// chunk_gated_delta_rule() in kFast for sequences one behind another: rows [1, tokens, ..], of
// which sequence i has lengths[i]; state [sequences, ..] or undefined. Differentiable.
DeltaResult packed_gated_delta_rule(const DeltaRows& rows,
                                    std::span<const std::int64_t> lengths,
                                    const at::Tensor& state);

}  // namespace ferry::models
