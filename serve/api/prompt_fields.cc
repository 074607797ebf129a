#include "serve/api/prompt_fields.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace ferry::serve {

void read_echo(const Fields& fields, const ServedModel& model, GenerationRequest& request) {
  bool echo = false;
  fields.read("echo", echo);
  if (!echo) return;
  const auto& tokenizer = model.require_tokenizer("echo");
  const auto* const prompt = fields.has("prompt_token_ids") ? nullptr : fields.find("prompt");
  for (std::size_t i = 0; i < request.prompts.size(); ++i) {
    const auto* const given =
        prompt != nullptr && prompt->is_array() && i < prompt->size() ? &(*prompt)[i] : prompt;
    if (given != nullptr && given->is_string()) {
      request.echoes.push_back(given->get<std::string>());
      continue;
    }
    const std::vector<rollout::text::TokenId> ids(request.prompts[i].begin(),
                                                  request.prompts[i].end());
    request.echoes.push_back(
        tokenizer.decode(ids, {.skip_special_tokens = request.skip_special_tokens}));
  }
}

void read_prompt_logprobs(const Fields& fields, GenerationRequest& request) {
  std::optional<std::int64_t> most;
  fields.read("prompt_logprobs", most);
  if (most && (*most < 0 || *most > kMostLogprobs))
    fields.refuse("prompt_logprobs", fmt::format("is not in [0, {}]", kMostLogprobs));
  request.prompt_logprobs = most;
  if (request.logprobs && !request.echoes.empty())
    most = std::max(most.value_or(0), request.params.logprobs.value_or(0));
  request.params.prompt_logprobs = most;
  if (request.stream && most)
    fields.refuse(request.prompt_logprobs ? "prompt_logprobs" : "echo",
                  request.prompt_logprobs ? "is not supported in a stream"
                                          : "is not supported with logprobs in a stream");
}

}  // namespace ferry::serve
