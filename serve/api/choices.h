// The answer to a request in OpenAI's shapes: its samples, whole or as parts of a stream.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "rollout/request_output.h"
#include "rollout/sample_text.h"
#include "serve/api/api_error.h"
#include "serve/api/generation_request.h"
#include "serve/api/served_model.h"

namespace ferry::serve {

// A sample: all of it, or its tokens since the last part.
struct SamplePart {
  std::int64_t index = 0;  // among all samples of the request
  std::string text{};
  std::string reasoning{};
  std::vector<rollout::text::ToolCall> calls{};
  std::size_t first_call = 0;  // the number of calls in parts before
  std::vector<rollout::TokenOutput> tokens{};
  rollout::FinishReason finish_reason = rollout::FinishReason::kNone;
  ordered_json stop_reason{};  // the stop token or string; null
};

// The tokens of a prompt but for the first.
using PromptLogprobs = std::vector<rollout::PromptTokenOutput>;

struct Usage {
  std::int64_t prompt_tokens = 0;
  std::int64_t completion_tokens = 0;
  std::int64_t cached_tokens = 0;  // of the prompt, which the prefix cache had
};
ordered_json usage_json(const Usage& usage);

// Writes the JSON of one request.
class AnswerWriter {
 public:
  // All outlive this.
  AnswerWriter(const GenerationRequest& request,
               const ServedModel& model,
               TokenTexts& texts,
               std::string id,
               std::int64_t created);

  // The response of a request that is no stream. `version`: of the weights; `prompt_logprobs`: of
  // each prompt, if the request asks for them.
  std::string whole(std::vector<SamplePart> samples,
                    const Usage& usage,
                    std::int64_t version,
                    std::vector<PromptLogprobs> prompt_logprobs);

  // The version of the weights, which chunks have as their system_fingerprint from now on: 0 at
  // first.
  void set_version(std::int64_t version);
  // The parts of a stream, without their framing. The first part of a chat's sample names its role;
  // it also has the prompt's ids if they are asked for. `usage`: of the part's sample so far.
  std::string first_chunk(std::int64_t index);
  std::string chunk(SamplePart part, const Usage& usage);
  std::string usage_chunk(const Usage& usage);

 private:
  ordered_json envelope(const char* object, std::int64_t version) const;
  std::string chunk_of(const ordered_json& choice, const ordered_json& more) const;
  ordered_json choice(SamplePart& part, bool is_whole);
  ordered_json logprobs_of(const SamplePart& part);
  ordered_json completion_logprobs(const SamplePart& part);
  std::string prompt_logprobs_of(std::int64_t index);
  ordered_json chat_logprobs(const SamplePart& part);
  const std::string& text_of(std::int64_t token_id, std::string& buffer);
  ordered_json calls_json(const SamplePart& part, bool is_whole) const;
  std::size_t prompt_number(std::int64_t index) const;
  const std::vector<std::int64_t>& prompt_of(std::int64_t index) const;

  const GenerationRequest& request_;
  const ServedModel& model_;
  TokenTexts& texts_;
  std::string id_;
  std::int64_t created_;
  std::int64_t version_ = 0;
  std::string chunk_head_;  // of each chunk, up to the choice
  std::vector<PromptLogprobs> prompt_logprobs_;
  std::vector<std::int64_t> text_offsets_;  // of samples: characters of their tokens so far
};

}  // namespace ferry::serve
