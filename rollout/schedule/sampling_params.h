// How the tokens of one request are drawn and when it ends: vLLM's SamplingParams, name for name.
// rollout/sampler.h says what each number does to a row of logits.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ferry::rollout {

struct SamplingParams {
  std::int64_t n = 1;                   // [1, 16384], answers to one prompt
  double temperature = 1;               // 0: greedy, the token of the largest logit
  std::int64_t top_k = 0;               // 0 or -1: all tokens
  double top_p = 1;                     // (0, 1]
  double min_p = 0;                     // [0, 1], of the largest probability
  double repetition_penalty = 1;        // above 0; of tokens of the prompt and the answer
  double presence_penalty = 0;          // [-2, 2], of tokens of the answer
  double frequency_penalty = 0;         // [-2, 2], for each time that a token is in the answer
  std::optional<std::uint64_t> seed{};  // nothing: the engine's
  std::vector<std::string> stop{};      // strings; the text ends before the first of them
  std::vector<std::int64_t> stop_token_ids{};
  bool ignore_eos = false;
  std::int64_t max_tokens = 16;
  std::int64_t min_tokens = 0;             // before these, neither EOS nor stop_token_ids are drawn
  std::optional<std::int64_t> logprobs{};  // log-probabilities of this many likeliest tokens, too
  bool return_entropy = false;             // of what each token was drawn from
  bool return_sampling_mask = false;       // the tokens that each was drawn from

  bool greedy() const { return temperature == 0; }
  bool penalizes() const {
    return repetition_penalty != 1 || presence_penalty != 0 || frequency_penalty != 0;
  }
  // Whether tokens are left out of the draw.
  bool truncates() const { return !greedy() && (top_k > 0 || top_p < 1 || min_p > 0); }

  // Throws Error(kUsage) that names the field which is out of range, or contradicts another.
  void verify() const;
};

}  // namespace ferry::rollout
