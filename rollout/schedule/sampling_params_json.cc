#include "rollout/schedule/sampling_params_json.h"

#include <nlohmann/json.hpp>

namespace ferry::rollout {
namespace {

using nlohmann::json;

// Calls `visit` with the name of each member and the member.
template <typename Params, typename Visit>
void visit_members(Params& params, const Visit& visit) {
  visit("n", params.n);
  visit("temperature", params.temperature);
  visit("top_k", params.top_k);
  visit("top_p", params.top_p);
  visit("min_p", params.min_p);
  visit("repetition_penalty", params.repetition_penalty);
  visit("presence_penalty", params.presence_penalty);
  visit("frequency_penalty", params.frequency_penalty);
  visit("seed", params.seed);
  visit("stop", params.stop);
  visit("stop_token_ids", params.stop_token_ids);
  visit("ignore_eos", params.ignore_eos);
  visit("max_tokens", params.max_tokens);
  visit("min_tokens", params.min_tokens);
  visit("logprobs", params.logprobs);
  visit("prompt_logprobs", params.prompt_logprobs);
  visit("return_entropy", params.return_entropy);
  visit("return_sampling_mask", params.return_sampling_mask);
  visit("structured_outputs", params.structured_outputs);
  visit("logit_bias", params.logit_bias);
  visit("allowed_token_ids", params.allowed_token_ids);
  visit("bad_words_token_ids", params.bad_words_token_ids);
}

template <typename T>
void write_member(json& message, const T& value) {
  message = value;
}
template <typename T>
void write_member(json& message, const std::optional<T>& value) {
  message = value ? json(*value) : json();
}

template <typename T>
void read_member(const json& message, T& into) {
  message.get_to(into);
}
template <typename T>
void read_member(const json& message, std::optional<T>& into) {
  into = message.is_null() ? std::nullopt : std::optional(message.get<T>());
}

}  // namespace

void to_json(json& message, const SamplingParams& params) {
  visit_members(params,
                [&](const char* name, const auto& value) { write_member(message[name], value); });
}

void from_json(const json& message, SamplingParams& params) {
  visit_members(params, [&](const char* name, auto& into) { read_member(message.at(name), into); });
}

}  // namespace ferry::rollout
