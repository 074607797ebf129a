// The sampling parameters and the end of one request: vLLM's SamplingParams, name for name.
// rollout/sampler.h has the formulas.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace ferry::rollout {

struct SamplingParams {
  std::int64_t n = 1;                   // [1, 16384], answers to one prompt
  double temperature = 1;               // 0: greedy, the token of the largest logit
  std::int64_t top_k = 0;               // 0 or -1: all tokens
  double top_p = 1;                     // (0, 1]
  double min_p = 0;                     // [0, 1], times the largest probability
  double repetition_penalty = 1;        // above 0; for tokens of the prompt and the answer
  double presence_penalty = 0;          // [-2, 2], for tokens of the answer
  double frequency_penalty = 0;         // [-2, 2], for each time that a token is in the answer
  std::optional<std::uint64_t> seed{};  // default: the engine's
  std::vector<std::string> stop{};      // strings; the text ends before the first of them
  std::vector<std::int64_t> stop_token_ids{};
  bool ignore_eos = false;
  std::int64_t max_tokens = 16;
  std::int64_t min_tokens = 0;             // EOS and stop_token_ids are not drawn before these
  std::optional<std::int64_t> logprobs{};  // also return this many likeliest tokens
  // Also return the log-probabilities of the prompt's tokens, each with so many likeliest ones.
  std::optional<std::int64_t> prompt_logprobs{};
  bool return_entropy = false;        // of the distribution of each token
  bool return_sampling_mask = false;  // the tokens that could be drawn
  // The answer's format, as JSON (grammar/format.h); empty: any text. EOS and
  // stop_token_ids are drawn where the format lets the answer end, and only there.
  std::string structured_outputs{};
  // Added to the logits of tokens, in [-100, 100]; each token once.
  std::vector<std::pair<std::int64_t, float>> logit_bias{};
  std::vector<std::int64_t> allowed_token_ids{};  // all tokens if empty
  // Sequences of tokens whose last one is not drawn behind the others.
  std::vector<std::vector<std::int64_t>> bad_words_token_ids{};

  bool greedy() const { return temperature == 0; }
  bool penalizes() const {
    return repetition_penalty != 1 || presence_penalty != 0 || frequency_penalty != 0;
  }
  // True if the model's logits are others before anything else is done.
  bool shifts_logits() const { return !logit_bias.empty() || !allowed_token_ids.empty(); }
  // True if a draw depends on the tokens before it, by more than the model.
  bool looks_back() const {
    return penalizes() || !structured_outputs.empty() || !bad_words_token_ids.empty();
  }
  // True if the draw leaves tokens out.
  bool truncates() const { return !greedy() && (top_k > 0 || top_p < 1 || min_p > 0); }

  // Throws Error(kUsage) that names a field which is out of range or contradicts another.
  void verify() const;
};

}  // namespace ferry::rollout
