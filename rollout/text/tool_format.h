// The formats of calls of tools in a model's text. Each family of models writes them as its chat
// template does; the formats have the names of vLLM's parsers.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
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
  // <｜DSML｜invoke name="..."> with <｜DSML｜parameter name="..." string="...">, several in a
  // frame
  // <｜DSML｜function_calls> (V3.2) or <｜DSML｜tool_calls> (V4).
  kDeepSeekV32,
  kDeepSeekV4,
  kKimiK2,     // functions.name:index and JSON between Kimi's own tokens
  kMiniMaxM2,  // <minimax:tool_call> around <invoke name="..."> and <parameter name="...">
  kSeedOss,    // <seed:tool_call> around what kQwen3Coder has
  kOpenAi,     // messages on channels (GPT-OSS, harmony.h)
};

// `name`: one of tool_format_names(). Nothing for another one.
std::optional<ToolFormat> tool_format(std::string_view name);
std::vector<std::string> tool_format_names();
// The format that a chat template writes, or nothing.
std::optional<ToolFormat> tool_format_of_template(std::string_view chat_template);
// Answers have channels, whether tools are there or not.
inline bool has_channels(ToolFormat format) {
  return format == ToolFormat::kOpenAi;
}

struct ToolMarkers {
  std::string_view begin{};  // of a call, or of several
  std::string_view end{};
  std::span<const std::string_view> frames{};  // around all calls
};
// The markers of a format that has such, not kOpenAi. That of kLlama3Json has no end.
ToolMarkers markers_of(ToolFormat format);

}  // namespace ferry::rollout::text
