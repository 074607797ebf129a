// Reads one call of a tool, or several, out of the text between a format's markers.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "rollout/text/tool_format.h"

namespace ferry::rollout::text {

struct ToolCall {
  std::string name{};
  std::string arguments{};  // a JSON object
  std::string id{};         // where the model writes one (Kimi)

  bool operator==(const ToolCall&) const = default;
};

// The length of the longest suffix of the text that begins `marker`.
std::size_t beginning_at_end(std::string_view text, std::string_view marker);

// The types that a schema names, also those of its constants and of its alternatives.
std::set<std::string> types_of(const nlohmann::ordered_json& schema);
// True if a value of these types that is written without quotes is its own text, null aside.
bool is_text(const std::set<std::string>& types);

// A JSON object as one line, or nothing for any other text. Bytes that are not UTF-8 become U+FFFD.
std::optional<std::string> object_text(std::string_view text);

class ToolCallBody {
 public:
  // `tools`: of the request, whose schemas say which arguments are strings where a format does not;
  // may be null. Outlives this.
  ToolCallBody(ToolFormat format, const nlohmann::ordered_json& tools)
      : format_(format), tools_(tools) {}

  // Adds the calls between two markers. False: these are none, and nothing is added.
  bool read(std::string_view body, std::vector<ToolCall>& calls) const;
  // The same at the end of a text that lacks the second marker: nothing says that arguments in tags
  // are all there, unless the tag around them ends.
  bool read_last(std::string_view body, std::vector<ToolCall>& calls) const;

 private:
  using Calls = std::vector<ToolCall>;

  bool read_function_tag(std::string_view body, Calls& calls) const;
  bool read_function_tags(std::string_view body, Calls& calls) const;
  bool read_arg_keys(std::string_view body, Calls& calls) const;
  const nlohmann::ordered_json* function_of(const std::string& name) const;
  bool read_invokes(std::string_view body, std::string_view mark, Calls& calls) const;
  bool read_invoke(std::string_view& body, std::string_view mark, ToolCall& call) const;
  nlohmann::ordered_json argument(const std::string& tool,
                                  const std::string& key,
                                  std::string_view value) const;

  ToolFormat format_;
  const nlohmann::ordered_json& tools_;
};

}  // namespace ferry::rollout::text
