// The prompt of a chat: its messages, tools and images, through the model's template.
#pragma once

#include <cstdint>
#include <vector>

#include "serve/api/api_error.h"
#include "serve/api/fields.h"
#include "serve/api/served_model.h"

namespace ferry::serve {

struct ChatPrompt {
  std::vector<std::int64_t> token_ids{};
  ImageFiles images{};
};

// The prompt of a chat: `messages`, `tools` and the options of the template in `body`. `is_prompt`:
// as ServedModel::encode() has it.
ChatPrompt chat_prompt(const ordered_json& body, const ServedModel& model, bool is_prompt = false);

// The messages of a chat as templates want them: parts of text as one text, arguments of calls as
// objects. `sees`: parts of images stay; otherwise they are refused.
ordered_json chat_messages(const ordered_json& body, bool sees = false);

// Functions; null without any. OpenAI's custom tools take a text that no chat template asks for.
ordered_json tools_of(const Fields& fields);

}  // namespace ferry::serve
