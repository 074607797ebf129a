// The engine's output: the tokens that a step drew for each request, and why the request ended. Its
// counters.
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
  float logprob = 0;            // by the model: the whole distribution at temperature 1
  float processed_logprob = 0;  // by the distribution that it was drawn from
  float entropy = 0;            // of that distribution, with SamplingParams::return_entropy
  // The tokens that could be drawn, ascending, if return_sampling_mask.
  std::vector<std::int32_t> sampling_mask{};
  // The model's likeliest tokens at this position, SamplingParams::logprobs of them.
  struct Top {
    std::int64_t token_id = 0;
    float logprob = 0;
  };
  std::vector<Top> top{};
};

// A token of a prompt but for the first, by the model at temperature 1.
struct PromptTokenOutput {
  std::int64_t token_id = 0;
  float logprob = 0;
  std::int64_t rank = 0;                // tokens that are as likely or likelier, itself among them
  std::vector<TokenOutput::Top> top{};  // SamplingParams::prompt_logprobs of them
};

// One sample of a request, under vLLM's names.
struct CompletionOutput {
  std::int64_t index = 0;             // of the n samples
  std::vector<TokenOutput> tokens{};  // since the previous output
  // If enable_return_routed_experts: the bytes of a routed_experts_tensor() (routed_experts.h)
  // for the tokens that were computed since the previous output; the first has the prompt's. The
  // last token of a sample is never computed.
  std::vector<std::byte> routed_experts{};
  FinishReason finish_reason = FinishReason::kNone;
  std::optional<std::int64_t> stop_reason{};  // for kStop: the token
  // Beside the first token: from the first step that computed the prompt to it.
  std::optional<double> prefill_seconds{};
};

struct RequestOutput {
  std::string request_id{};
  std::vector<CompletionOutput> outputs{};  // of the samples with new tokens
  bool finished = false;                    // all samples: this is the last output
  std::optional<Error> error{};             // why the request was refused
  // SamplingParams::prompt_logprobs: beside the first token of the first sample, of each token of
  // the prompt but the first.
  std::vector<PromptTokenOutput> prompt_logprobs{};
  // Beside the first token of the first sample: tokens of the prompt that the prefix cache had.
  std::optional<std::int64_t> num_cached_tokens{};
};

struct EngineStats {
  std::int64_t num_blocks = 0;
  std::int64_t num_free_blocks = 0;
  std::int64_t num_waiting = 0;  // sequences
  std::int64_t num_running = 0;
  std::int64_t num_preemptions = 0;
  std::int64_t prompt_tokens = 0;  // computed; counted again after a preemption
  std::int64_t cached_tokens = 0;  // found in the prefix cache
  std::int64_t output_tokens = 0;
  std::int64_t steps = 0;
};

}  // namespace ferry::rollout
