// The bodies of /v1/completions and /v1/chat/completions, in OpenAI's terms with vLLM's additions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "rollout/schedule/sampling_params.h"
#include "serve/api/api_error.h"
#include "serve/api/served_model.h"

namespace ferry::serve {

struct GenerationRequest {
  bool is_chat = false;
  std::vector<std::vector<std::int64_t>> prompts{};  // token ids; of a chat one
  bool are_texts = false;  // the prompts were such; one that is too long has some tokens of all
  ImageFiles images{};     // of a chat
  rollout::SamplingParams params{};
  bool stream = false;
  bool include_usage = false;           // a stream ends with its usage
  bool continuous_usage_stats = false;  // and each part has the usage so far
  bool logprobs = false;
  std::optional<std::int64_t> prompt_logprobs{};  // likeliest tokens beside each of the prompt's
  bool return_token_ids = false;
  bool return_tokens_as_token_ids = false;  // in logprobs: "token_id:7" for the text
  bool skip_special_tokens = true;
  bool include_stop_str_in_output = false;
  std::vector<std::string> echoes{};  // the prompts' texts, if answers begin with them
  bool draws_nothing = false;         // answers are these alone
  std::optional<rollout::text::ToolFormat> tool_format{};  // of calls to find in the answer
  ordered_json tools{};
  std::optional<rollout::text::Thoughts> thoughts{};  // that answers begin with
  bool include_reasoning = true;                      // answers have them
  bool parallel_tool_calls = true;                    // an answer may have several

  std::int64_t num_samples() const { return static_cast<std::int64_t>(prompts.size()) * params.n; }
};

// Throws ApiError that names the field: 404 for another model, 400 for a value that is out of range
// or not supported. Fields that OpenAI's API knows and that change no answer, and unknown ones, are
// passed over.
GenerationRequest parse_completion(const ordered_json& body, const ServedModel& model);
GenerationRequest parse_chat_completion(const ordered_json& body, const ServedModel& model);

void check_model(const ordered_json& body, const ServedModel& model);

}  // namespace ferry::serve
