// What the engine answers: of each request the tokens that a step brought, and how it ended.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "distckpt/base/error.h"
#include "rollout/schedule/sequence.h"

namespace ferry::rollout {

// A token that was drawn.
struct TokenOutput {
  std::int64_t token_id = 0;
  float logprob = 0;            // of the model: of the whole distribution at temperature 1
  float processed_logprob = 0;  // of the distribution that it was drawn from
  float entropy = 0;            // of that one, with SamplingParams::return_entropy
  // With return_sampling_mask: those that it was drawn from, ascending.
  std::vector<std::int32_t> sampling_mask{};
  // The model's likeliest tokens in its place, as many as SamplingParams::logprobs asks for.
  struct Top {
    std::int64_t token_id = 0;
    float logprob = 0;
  };
  std::vector<Top> top{};
};

// One sample of a request, as vLLM names it.
struct CompletionOutput {
  std::int64_t index = 0;             // of the n samples
  std::vector<TokenOutput> tokens{};  // since the output before
  // With enable_return_routed_experts: where routers sent the tokens that were computed since the
  // output before, the prompt's with the first; never the last token, which is not computed.
  // The bytes of a routed_experts_tensor() (routed_experts.h).
  std::vector<std::byte> routed_experts{};
  FinishReason finish_reason = FinishReason::kNone;
  std::optional<std::int64_t> stop_reason{};  // of kStop: the token
};

struct RequestOutput {
  std::string request_id{};
  std::vector<CompletionOutput> outputs{};  // of the samples that have something new
  bool finished = false;                    // all samples; nothing comes any more
  std::optional<Error> error{};             // why the request was refused
};

}  // namespace ferry::rollout
