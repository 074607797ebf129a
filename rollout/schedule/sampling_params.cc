#include "rollout/schedule/sampling_params.h"

#include <algorithm>
#include <cmath>

#include "distckpt/base/error.h"

namespace ferry::rollout {
namespace {

// Below it logits times 1/temperature exceed fp32's range, long after draws have become greedy.
constexpr double kLeastTemperature = 0.01;

constexpr std::int64_t kMostSamples = 16384;  // of a prompt, as vLLM has it

template <typename Value>
void check(bool ok, const char* field, const Value& value, const char* expected) {
  require(ok, ErrorKind::kUsage, "{}: {} is not {}", field, value, expected);
}

void check_penalty(const char* field, double value) {
  check(value >= -2 && value <= 2, field, value, "in [-2, 2]");
}

}  // namespace

void SamplingParams::verify() const {
  check(n >= 1 && n <= kMostSamples, "n", n, "in [1, 16384]");
  check(temperature == 0 || (temperature >= kLeastTemperature && std::isfinite(temperature)),
        "temperature", temperature, "0 (greedy), nor a number from 0.01 on");
  check(top_k >= -1, "top_k", top_k, "-1 or 0 (all tokens), nor 1 or more");
  check(top_p > 0 && top_p <= 1, "top_p", top_p, "in (0, 1]");
  check(min_p >= 0 && min_p <= 1, "min_p", min_p, "in [0, 1]");
  check(repetition_penalty > 0 && std::isfinite(repetition_penalty), "repetition_penalty",
        repetition_penalty, "above 0");
  check_penalty("presence_penalty", presence_penalty);
  check_penalty("frequency_penalty", frequency_penalty);
  require(std::ranges::none_of(stop, &std::string::empty), ErrorKind::kUsage,
          "stop: an empty string ends every text before it begins");
  for (const auto id : stop_token_ids) check(id >= 0, "stop_token_ids", id, "a token id");
  check(max_tokens >= 1, "max_tokens", max_tokens, "1 or more");
  check(min_tokens >= 0, "min_tokens", min_tokens, "0 or more");
  require(min_tokens <= max_tokens, ErrorKind::kUsage,
          "min_tokens: {} are more than max_tokens, {}", min_tokens, max_tokens);
  for (const auto& [field, most] :
       {std::pair("logprobs", logprobs), std::pair("prompt_logprobs", prompt_logprobs)})
    if (most) check(*most >= 0, field, *most, "0 or more");
  require(!return_sampling_mask || (truncates() && !penalizes() && min_tokens == 0),
          ErrorKind::kUsage,
          "return_sampling_mask: is of top_k, top_p and min_p, without penalties and min_tokens");
  require(!return_entropy || return_sampling_mask || !(truncates() || penalizes()),
          ErrorKind::kUsage,
          "return_entropy: of tokens that are cut off it needs return_sampling_mask, and with "
          "penalties there is none");
  // No token would be left where the format allows nothing but what one of these forbids.
  for (const auto& [field, is_set] : {std::pair("min_tokens", min_tokens > 0),
                                      std::pair("allowed_token_ids", !allowed_token_ids.empty()),
                                      std::pair("bad_words", !bad_words_token_ids.empty()),
                                      std::pair("return_entropy", return_entropy),
                                      std::pair("return_sampling_mask", return_sampling_mask)})
    require(structured_outputs.empty() || !is_set, ErrorKind::kUsage,
            "{}: is not supported beside a format of the answer (structured outputs)", field);
  for (const auto& [id, bias] : logit_bias) {
    check(id >= 0, "logit_bias", id, "a token id");
    check(bias >= -100 && bias <= 100, "logit_bias", bias, "in [-100, 100]");
  }
  for (const auto id : allowed_token_ids) check(id >= 0, "allowed_token_ids", id, "a token id");
  for (const auto& word : bad_words_token_ids)
    require(!word.empty(), ErrorKind::kUsage, "bad_words: a word without tokens");
  require(!(shifts_logits() || !bad_words_token_ids.empty()) ||
              !(return_entropy || return_sampling_mask),
          ErrorKind::kUsage,
          "logit_bias: is not supported with return_entropy and return_sampling_mask, as are "
          "allowed_token_ids and bad_words");
  require(n == 1 || !greedy(), ErrorKind::kUsage,
          "n: {} answers at temperature 0 are {} times the same", n, n);
}

}  // namespace ferry::rollout
