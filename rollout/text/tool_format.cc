#include "rollout/text/tool_format.h"

#include <array>

namespace ferry::rollout::text {
namespace {

constexpr std::array<std::string_view, 2> kDeepSeekFrames{"<｜tool▁calls▁begin｜>",
                                                          "<｜tool▁calls▁end｜>"};
constexpr std::array<std::string_view, 2> kLlama4Frames{"<|python_start|>", "<|python_end|>"};
constexpr std::array<std::string_view, 2> kKimiFrames{"<|tool_calls_section_begin|>",
                                                      "<|tool_calls_section_end|>"};

}  // namespace

std::optional<ToolFormat> tool_format_of_template(std::string_view chat_template) {
  const auto has = [&](std::string_view text) {
    return chat_template.find(text) != std::string_view::npos;
  };
  if (has("<|channel|>") && has("<|call|>")) return ToolFormat::kOpenAi;
  if (has(kKimiFrames[0])) return ToolFormat::kKimiK2;
  if (has("<|tool_call>")) return ToolFormat::kGemma4;
  if (has("<start_function_call>")) return ToolFormat::kFunctionGemma;
  if (has("[TOOL_CALLS]")) return ToolFormat::kMistral;
  if (has("<|tool_call|>") && !has("<tool_call>") && !has("<|/tool_call|>"))
    return ToolFormat::kGranite;
  if (has("functools[")) return ToolFormat::kPhi4Mini;
  if (has("<function_calls>")) return ToolFormat::kOlmo3;
  if (has("<tool_calls>")) return ToolFormat::kHunyuan;
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
    case ToolFormat::kGranite:
      return {.begin = "<|tool_call|>", .other_begin = "<tool_call>"};
    case ToolFormat::kPhi4Mini:
      return {.begin = "functools"};
    case ToolFormat::kMistral:
      return {.begin = "[TOOL_CALLS]"};
    case ToolFormat::kHunyuan:
      return {"<tool_calls>", "</tool_calls>"};
    case ToolFormat::kOlmo3:
      return {"<function_calls>", "</function_calls>"};
    case ToolFormat::kPythonic:
      return {.frames = kLlama4Frames};
    case ToolFormat::kGemma4:
      return {"<|tool_call>", "<tool_call|>"};
    case ToolFormat::kFunctionGemma:
      return {"<start_function_call>", "<end_function_call>"};
    case ToolFormat::kHermes:
    case ToolFormat::kQwen3Coder:
    case ToolFormat::kGlm45:
    case ToolFormat::kOpenAi:
      break;
  }
  return {"<tool_call>", "</tool_call>"};
}

}  // namespace ferry::rollout::text
