// Draws the next token of each row of logits. A draw is a function of the row, its parameters and
// (seed, request, position): not of the other rows, and the same token on the host and on a GPU.
//
// From the row's logits l, in fp32, NaN counting as -inf, in the order of vLLM's sampler:
//   1. of forbidden tokens, l = -inf;
//   2. penalties: of tokens of prompt and answer, l = l / repetition_penalty where l > 0, else l *
//      repetition_penalty; of those c times in the answer, l -= frequency_penalty * c, and l -=
//      presence_penalty;
//   3. temperature: z = l * (1 / temperature). Greedy: z = l, the token is the largest's, done;
//   4. min_p keeps the tokens with exp(z - max z) >= min_p;
//   5. top_k, of these, the tokens from the k-th largest z on, with all that equal it;
//   6. top_p, of these, from the largest z on (of equal ones the smallest id first), the tokens
//      before which the kept ones' probabilities sum up to less than top_p: at least one;
//   7. the token is the kept one with the largest z + g, g being Gumbel noise of Philox4x32-10 with
//      key seed and counter (request, position, token). Of equal ones the smallest id.
// Steps 1 to 6 make the processed distribution, softmax of z over the kept tokens. Its sums are in
// integers (kernels/draw_formula.h), so that their order does not matter.
//
// A row with a NaN gets a token too, but NaN for its log-probability.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

#include "models/kernels/log_probs.h"
#include "rollout/kernels/draw.h"
#include "rollout/schedule/sampling_params.h"

namespace ferry::rollout {

struct SamplingRow {
  const SamplingParams* params = nullptr;
  std::uint64_t seed = 0;
  std::uint64_t request = 0;               // with the index of the sample folded in
  std::int64_t position = 0;               // of the token that is drawn, in its sequence
  std::span<const std::int64_t> prompt{};  // read for penalties alone, like output
  std::span<const std::int64_t> output{};
  std::span<const std::int64_t> forbidden{};  // before min_tokens: EOS and stop_token_ids
};

struct SampledTokens {
  at::Tensor tokens{};  // [rows], int64, on the logits' device, like the rest
  // [rows], fp32, of the model: of score_rows() of models/kernels/log_probs.h at temperature 1, the
  // bytes that a trainer computes from these logits.
  at::Tensor logprobs{};
  // [rows], fp32, of the processed distribution. Where it is the model's at some temperature, the
  // bytes of log_probs_of(row_statistics) at that temperature; of a greedy row, at temperature 1.
  // So it is of a row that asks for its sampling mask, behind apply_sampling_mask().
  at::Tensor processed_logprobs{};
  // [rows], fp32, of the same distribution: the bytes of entropies_of(row_statistics). Undefined
  // where no row asks; of rows that do not, any number.
  at::Tensor entropies{};
  // Of rows that ask, what steps 4 to 6 keep, ascending; of the others nothing. Undefined where no
  // row asks.
  models::SamplingMask sampling_mask{};
  // [rows, most that a row asks for], the likeliest tokens of the model, in the order of step 6.
  // Undefined where no row asks.
  at::Tensor top_tokens{};    // int64
  at::Tensor top_logprobs{};  // fp32
};

// In plain numbers, which need no logits.
Draws draws_of(std::span<const SamplingRow> rows, std::int64_t vocab_size);

// logits [rows, >= vocab_size], bf16 or fp32, contiguous; columns from vocab_size on are padding.
SampledTokens sample(const at::Tensor& logits,
                     std::int64_t vocab_size,
                     std::span<const SamplingRow> rows,
                     const Draws& draws);
SampledTokens sample(const at::Tensor& logits,
                     std::int64_t vocab_size,
                     std::span<const SamplingRow> rows);

}  // namespace ferry::rollout
