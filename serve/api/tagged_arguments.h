// Arguments of calls in the formats that write each one between tags, and strings without quotes.
#pragma once

#include <string>

#include "rollout/text/tool_format.h"
#include "serve/api/answer_format.h"

namespace ferry::serve {

// The tags around the name of an argument and its value.
struct ArgumentTags {
  std::string begin{};
  std::string between{};
  std::string end{};
  std::string between_json{};  // for values that are no strings, if they have another
};

// The text of an answer around the arguments of one call.
struct TaggedCall {
  rollout::text::ToolFormat format{};
  std::string tool{};
  std::string begin{};
  std::string end{};
};

// Arguments that are valid by the schema, in its order. Throws ApiError 400 that names what of the
// schema the format cannot hold to, or its parser would read as something else.
ordered_json tagged_arguments(const TaggedCall& call,
                              const ordered_json& schema,
                              const ArgumentTags& tags);

// Puts into each tool's parameters what their own $ref and allOf say, where that can be done.
void unite_parameters(ordered_json& tools);

}  // namespace ferry::serve
