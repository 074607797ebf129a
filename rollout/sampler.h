// Draws the next token of each row of logits. A draw is a function of the row, its parameters and
// (seed, request, position): not of the other rows, and the same token on the host and on a GPU.
//
// Steps from the row's logits l, in fp32, NaN counting as -inf, in the order of vLLM's sampler:
//   1. tokens that are not allowed: l = -inf; l += the token's logit_bias; forbidden tokens, and
//      those that would complete a bad word: l = -inf;
//   2. penalties: for tokens of prompt and answer, l = l / repetition_penalty if l > 0, else l *
//      repetition_penalty; for those c > 0 times in the answer, l -= frequency_penalty * c and l -=
//      presence_penalty;
//   3. temperature: z = l * (1 / temperature). Greedy: z = l, the token is that of the largest z;
//   4. min_p keeps the tokens with exp(z - max z) >= min_p;
//   5. top_k keeps, of these, the tokens whose z is at least the k-th largest;
//   6. top_p goes through these by descending z (equal ones by ascending id) and keeps a token if
//   the
//      probabilities before it sum up to less than top_p: at least one token;
//   7. the token is the kept one with the largest z + g, g being Gumbel noise of Philox4x32-10 with
//      key seed and counter (request, position, token); of equal sums, the smallest id.
// Steps 1 to 6 make the processed distribution, softmax of z over the kept tokens. Its sums are in
// integers (kernels/draw_formula.h), so that their order does not matter.
//
// A row with a NaN gets a token too, but NaN for its log-probability.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "models/kernels/log_probs.h"
#include "rollout/grammar/token_constraint.h"
#include "rollout/kernels/draw.h"
#include "rollout/request_output.h"
#include "rollout/schedule/sampling_params.h"
#include "rollout/schedule/scheduler.h"

namespace ferry::rollout {

struct SamplingRow {
  const SamplingParams* params = nullptr;
  std::uint64_t seed = 0;
  std::uint64_t request = 0;               // a hash of the request and the sample's index
  std::int64_t position = 0;               // of the drawn token in its sequence
  std::span<const std::int64_t> prompt{};  // read for penalties only, like output
  std::span<const std::int64_t> output{};
  std::span<const std::int64_t> forbidden{};  // before min_tokens: EOS and stop_token_ids
  // All tokens but those that it allows now are forbidden as well. Null: none.
  grammar::TokenConstraint* constraint = nullptr;
};

struct SampledTokens {
  at::Tensor tokens{};  // [rows], int64, on the logits' device, like the rest
  // [rows], fp32, by the model: score_rows() of models/kernels/log_probs.h at temperature 1, the
  // bytes that a trainer computes from these logits.
  at::Tensor logprobs{};
  // [rows], fp32, by the processed distribution. If that is the model's at some temperature, the
  // bytes of log_probs_of(row_statistics) at that temperature (a greedy row: 1); for a row that
  // asks for its sampling mask, the same after apply_sampling_mask().
  at::Tensor processed_logprobs{};
  // [rows], fp32, of the same distribution: the bytes of entropies_of(row_statistics). Undefined if
  // no row asks; any number for rows that do not.
  at::Tensor entropies{};
  // The tokens that steps 4 to 6 keep, ascending, for rows that ask, and none for others. Undefined
  // if no row asks.
  models::SamplingMask sampling_mask{};
  // [rows, most that a row asks for], the likeliest tokens of the model, in the order of step 6.
  // Undefined if no row asks.
  at::Tensor top_tokens{};    // int64
  at::Tensor top_logprobs{};  // fp32
};

// The `count` likeliest tokens of each row, in the order of step 6. `statistics`: of score_rows().
struct LikeliestTokens {
  at::Tensor tokens{};    // [rows, count], int64
  at::Tensor logprobs{};  // [rows, count], fp32
};
LikeliestTokens likeliest_tokens(const at::Tensor& logits,
                                 std::int64_t vocab_size,
                                 std::int64_t count,
                                 const at::Tensor& statistics);

// The tokens of a prompt that rows of a step say the log-probabilities of: each the token behind.
struct ScoredPrompt {
  Sequence* sequence = nullptr;  // null: it has ended meanwhile
  std::int64_t position = 0;     // of the first of these tokens
  at::Tensor logprobs{};         // [tokens], fp32, as SampledTokens::logprobs
  at::Tensor ranks{};            // [tokens], int64: tokens that are as likely or likelier
  LikeliestTokens likeliest{};   // as many as it asks for; undefined for 0

  std::array<at::Tensor*, 4> tensors() {
    return {&logprobs, &ranks, &likeliest.tokens, &likeliest.logprobs};
  }
  // All of it on the host.
  std::vector<PromptTokenOutput> tokens() const;
};

struct PromptRows {
  std::int64_t vocab_size = 0;
  std::int64_t max_rows = 0;  // of logits at a time
};
// Scores the prompts that ask for it, of the sequences of a step. hidden [rows, hidden]: of the
// step; `logits_of` makes logits of some of them.
std::vector<ScoredPrompt> score_prompts(
    std::span<const ScheduledSequence> scheduled,
    const at::Tensor& hidden,
    PromptRows rows,
    const std::function<at::Tensor(const at::Tensor&)>& logits_of);

// The rows' parameters, which do not depend on the logits.
Draws draws_of(std::span<const SamplingRow> rows, std::int64_t vocab_size);

// logits [rows, >= vocab_size], float dtypes, contiguous; columns from vocab_size on are padding.
SampledTokens sample(const at::Tensor& logits,
                     std::int64_t vocab_size,
                     std::span<const SamplingRow> rows,
                     const Draws& draws);
SampledTokens sample(const at::Tensor& logits,
                     std::int64_t vocab_size,
                     std::span<const SamplingRow> rows);

}  // namespace ferry::rollout
