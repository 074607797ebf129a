// The gated delta rule on a GPU in bf16, for heads of 128 channels of keys and as many of values:
// products in bf16 with sums in fp32, states in fp32. In fixed orders.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

#include "models/kernels/delta/delta_rule.h"

namespace ferry::models {

bool delta_cuda_supports(const at::Tensor& rows, std::int64_t key_dim, std::int64_t value_dim);
// The same of heads alone, and of a convolution of `taps`.
bool delta_cuda_supports(std::int64_t key_dim, std::int64_t value_dim, std::int64_t taps);

// The core of a layer with a gated delta net: rows of tokens behind its projections, and the
// weights on their way to the normed and gated output.
struct DeltaCore {
  at::Tensor mixed{};        // [rows, channels]: query, key, value
  at::Tensor conv_weight{};  // [channels, 1, taps], at most 4 of them
  at::Tensor alpha{};        // [rows, heads]
  at::Tensor beta{};         // [rows, heads], before sigmoid
  at::Tensor gate{};         // [rows, heads * value_dim]
  at::Tensor a_log{};        // [heads]
  at::Tensor dt_bias{};      // [heads]
  at::Tensor norm{};         // [value_dim]: the weight less one
  double epsilon = 1e-6;
  std::int64_t key_heads = 0;
};

// One token of each of several sequences, `rows` [sequences] int64 the row of each, `slots`
// [sequences] int64 its slot. Moves the states on, conv [slots, taps - 1, channels] and recurrent
// [slots, heads, key_dim, value_dim], and writes the sequences' rows of output [rows, heads *
// value_dim]. Not differentiable; reads nothing back to the host.
void delta_step_cuda(const DeltaCore& core,
                     const at::Tensor& rows,
                     const at::Tensor& slots,
                     const at::Tensor& conv,
                     const at::Tensor& recurrent,
                     const at::Tensor& output);

// Consecutive rows of a sequence, and the slot of its state.
struct DeltaSpan {
  std::int64_t row_begin = 0;
  std::int64_t num_rows = 0;
  std::int64_t slot = 0;
};
// The same of several tokens of each sequence, one after another: with the bits of so many steps.
// `before` [sequences, taps - 1, channels] is what the convolution sees before them; undefined:
// zeros. `recurrent` moves on; undefined: zeros, and nothing is kept.
void delta_walk_cuda(const DeltaCore& core,
                     std::span<const DeltaSpan> spans,
                     const at::Tensor& before,
                     const at::Tensor& recurrent,
                     const at::Tensor& output);

// The output of chunk_gated_delta_rule() in kFast for sequences one behind another, which begin
// with zeros: rows [1, tokens, ..], of which sequence i has lengths[i]. Differentiable.
at::Tensor packed_gated_delta_rule(const DeltaRows& rows, std::span<const std::int64_t> lengths);

}  // namespace ferry::models
