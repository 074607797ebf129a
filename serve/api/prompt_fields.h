// The fields that ask for the prompt itself: `echo`, and the log-probabilities of its tokens.
#pragma once

#include <cstdint>

#include "serve/api/fields.h"
#include "serve/api/generation_request.h"
#include "serve/api/served_model.h"

namespace ferry::serve {

constexpr std::int64_t kMostLogprobs = 20;  // as OpenAI and vLLM have it

// Called when the prompts of a completion are read.
void read_echo(const Fields& fields, const ServedModel& model, GenerationRequest& request);

// Reads vLLM's prompt_logprobs, and asks for them where a prompt is echoed with `logprobs`. Called
// when both of these are read.
void read_prompt_logprobs(const Fields& fields, GenerationRequest& request);

}  // namespace ferry::serve
