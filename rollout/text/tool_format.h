// The formats of calls of tools in a model's text. Each family of models writes them as its chat
// template does; the formats have the names of vLLM's parsers.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ferry::rollout::text {

enum class ToolFormat : std::uint8_t {
  // <tool_call>...</tool_call> around {"name", "arguments"} (Hermes, Qwen 2.5, Qwen 3). The next
  // two differ in what a call that has to be made looks like: each is read as all three.
  kHermes,
  kQwen3Coder,  // around <function=name> and <parameter=key>
  kGlm45,       // around a name, <arg_key> and <arg_value>
  // The whole text is {"name", "parameters"}, or several between semicolons, perhaps behind
  // <|python_tag|> (Llama 3.1, 3.2).
  kLlama3Json,
  // Calls between DeepSeek's own tokens: a type, a name and a block of JSON (V3, R1), or a name and
  // JSON (V3.1). Both are read as either.
  kDeepSeekV3,
  kDeepSeekV31,
};

// `name`: one of tool_format_names(). Nothing for another one.
std::optional<ToolFormat> tool_format(std::string_view name);
std::vector<std::string> tool_format_names();
// The format that a chat template writes, or nothing.
std::optional<ToolFormat> tool_format_of_template(std::string_view chat_template);
// The format's markers are special tokens, which have to be part of the text.
bool has_special_markers(ToolFormat format);

}  // namespace ferry::rollout::text
