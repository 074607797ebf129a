// Draws a token for each row of logits. The rows' parameters are plain numbers, which are copied to
// a GPU as they are.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "rollout/kernels/draw_row.h"

namespace ferry::rollout {

struct Draws {
  std::vector<DrawRow> plain{};   // all tokens take part, with the model's logits
  std::vector<DrawRow> shaped{};  // penalties, forbidden tokens, or a part of the vocabulary
  std::vector<LogitChange> changes{};
  // The bytes of `plain` for one draw, if they are on the GPU already.
  at::Tensor plain_on_gpu{};
};

// Results, on the device of the logits.
struct DrawnRows {
  at::Tensor tokens{};              // [rows], int64
  at::Tensor processed_logprobs{};  // [rows], fp32: of shaped rows
  // [shaped rows, vocab_size], bool: whether a token could be drawn; undefined unless a row asks.
  at::Tensor kept{};
};

// logits [rows, >= vocab_size], bf16 or fp32, contiguous.
void draw_on_host(const at::Tensor& logits,
                  std::int64_t vocab_size,
                  const Draws& draws,
                  const DrawnRows& drawn);
// The same tokens and the same bytes. Does not synchronize.
void draw_on_gpu(const at::Tensor& logits,
                 std::int64_t vocab_size,
                 const Draws& draws,
                 const DrawnRows& drawn);

}  // namespace ferry::rollout
