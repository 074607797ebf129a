// The formats of calls of tools in a model's text. Each family of models writes them as its chat
// template does; the formats have the names of vLLM's parsers.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "distckpt/base/named.h"

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
  // A list of kHermes' objects: behind <|tool_call|> or <tool_call> (Granite 3), behind functools
  // (Phi-4-mini), between <tool_calls> and </tool_calls> (Hunyuan).
  kGranite,
  kPhi4Mini,
  kHunyuan,
  // [TOOL_CALLS] in front of such a list, or of each name with its arguments behind it, [ARGS]
  // between them or not (Mistral).
  kMistral,
  // Calls as Python writes them, f(key='value'): the whole text is a list of them (Llama 3.2, 4),
  // or they stand on lines between <function_calls> and </function_calls> (OLMo 3).
  kPythonic,
  kOlmo3,
  // call:name{key:value} between a family's own tokens, which are also the quotes of strings.
  kGemma4,
  kFunctionGemma,
  kOpenAi,  // messages on channels (GPT-OSS, harmony.h)
};

// Some families write what another one does.
inline constexpr auto kToolFormats = std::to_array<Named<ToolFormat>>({
    {"hermes", ToolFormat::kHermes},
    {"qwen3_coder", ToolFormat::kQwen3Coder},
    {"glm45", ToolFormat::kGlm45},
    {"llama3_json", ToolFormat::kLlama3Json},
    {"deepseek_v3", ToolFormat::kDeepSeekV3},
    {"deepseek_v31", ToolFormat::kDeepSeekV31},
    {"deepseek_v32", ToolFormat::kDeepSeekV32},
    {"deepseek_v4", ToolFormat::kDeepSeekV4},
    {"kimi_k2", ToolFormat::kKimiK2},
    {"minimax_m2", ToolFormat::kMiniMaxM2},
    {"seed_oss", ToolFormat::kSeedOss},
    {"openai", ToolFormat::kOpenAi},
    {"granite", ToolFormat::kGranite},
    {"granite4", ToolFormat::kHermes},
    {"ernie45", ToolFormat::kHermes},
    {"glm47", ToolFormat::kGlm45},
    {"mistral", ToolFormat::kMistral},
    {"phi4_mini_json", ToolFormat::kPhi4Mini},
    {"hunyuan_a13b", ToolFormat::kHunyuan},
    {"pythonic", ToolFormat::kPythonic},
    {"llama4_pythonic", ToolFormat::kPythonic},
    {"olmo3", ToolFormat::kOlmo3},
    {"gemma4", ToolFormat::kGemma4},
    {"functiongemma", ToolFormat::kFunctionGemma},
});

// The format that a chat template writes, or nothing.
std::optional<ToolFormat> tool_format_of_template(std::string_view chat_template);
// Answers have channels, whether tools are there or not.
inline bool has_channels(ToolFormat format) {
  return format == ToolFormat::kOpenAi;
}

struct ToolMarkers {
  std::string_view begin{};                    // of a call, or of several
  std::string_view end{};                      // empty: the call ends where its JSON does
  std::span<const std::string_view> frames{};  // around all calls
  std::string_view other_begin{};              // in place of `begin`; empty: none
};
// The markers of a format that has such, not kOpenAi and kPythonic. That of kLlama3Json has no end.
ToolMarkers markers_of(ToolFormat format);

}  // namespace ferry::rollout::text
