#include "rollout/text/tool_format.h"

#include <array>
#include <utility>

namespace ferry::rollout::text {
namespace {

constexpr std::array<std::pair<std::string_view, ToolFormat>, 12> kFormats{
    {{"hermes", ToolFormat::kHermes},
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
     {"openai", ToolFormat::kOpenAi}}};

constexpr std::array<std::string_view, 2> kDeepSeekFrames{"<｜tool▁calls▁begin｜>",
                                                          "<｜tool▁calls▁end｜>"};
constexpr std::array<std::string_view, 2> kKimiFrames{"<|tool_calls_section_begin|>",
                                                      "<|tool_calls_section_end|>"};

}  // namespace

std::optional<ToolFormat> tool_format(std::string_view name) {
  for (const auto& [known, format] : kFormats)
    if (name == known) return format;
  return std::nullopt;
}

std::vector<std::string> tool_format_names() {
  std::vector<std::string> names;
  for (const auto& [name, format] : kFormats) names.emplace_back(name);
  return names;
}

std::optional<ToolFormat> tool_format_of_template(std::string_view chat_template) {
  const auto has = [&](std::string_view text) {
    return chat_template.find(text) != std::string_view::npos;
  };
  if (has("<|channel|>") && has("<|call|>")) return ToolFormat::kOpenAi;
  if (has(kKimiFrames[0])) return ToolFormat::kKimiK2;
  if (has("<minimax:tool_call>")) return ToolFormat::kMiniMaxM2;
  if (has("<seed:tool_call>")) return ToolFormat::kSeedOss;
  if (has("｜DSML｜"))
    return has("function_calls>") ? ToolFormat::kDeepSeekV32 : ToolFormat::kDeepSeekV4;
  if (has("<tool_call>"))
    return has("<function=")  ? ToolFormat::kQwen3Coder
           : has("<arg_key>") ? ToolFormat::kGlm45
                              : ToolFormat::kHermes;
  if (has(kDeepSeekFrames[0]))
    return has("```json") ? ToolFormat::kDeepSeekV3 : ToolFormat::kDeepSeekV31;
  if (has("tools") && has("\"parameters\"")) return ToolFormat::kLlama3Json;
  return std::nullopt;
}

ToolMarkers markers_of(ToolFormat format) {
  switch (format) {
    case ToolFormat::kDeepSeekV3:
    case ToolFormat::kDeepSeekV31:
      return {"<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", kDeepSeekFrames};
    case ToolFormat::kDeepSeekV32:
      return {"<｜DSML｜function_calls>", "</｜DSML｜function_calls>"};
    case ToolFormat::kDeepSeekV4:
      return {"<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"};
    case ToolFormat::kKimiK2:
      return {"<|tool_call_begin|>", "<|tool_call_end|>", kKimiFrames};
    case ToolFormat::kMiniMaxM2:
      return {"<minimax:tool_call>", "</minimax:tool_call>"};
    case ToolFormat::kSeedOss:
      return {"<seed:tool_call>", "</seed:tool_call>"};
    case ToolFormat::kLlama3Json:
      return {.begin = "<|python_tag|>"};
    case ToolFormat::kHermes:
    case ToolFormat::kQwen3Coder:
    case ToolFormat::kGlm45:
    case ToolFormat::kOpenAi:
      break;
  }
  return {"<tool_call>", "</tool_call>"};
}

}  // namespace ferry::rollout::text
