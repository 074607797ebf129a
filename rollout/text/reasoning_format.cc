#include "rollout/text/reasoning_format.h"

#include <array>
#include <utility>

#include "distckpt/base/trimmed.h"

namespace ferry::rollout::text {
namespace {

constexpr ReasoningFormat kThink{.begin = "<think>", .end = "</think>"};

constexpr ReasoningFormat think_or_call(std::string_view call, bool by_default = true) {
  auto format = kThink;
  format.call = call;
  format.by_default = by_default;
  return format;
}

constexpr ReasoningFormat kQwen3 = think_or_call("<tool_call>\n<function=");

constexpr std::array<std::pair<std::string_view, ReasoningFormat>, 17> kReasoningFormats{
    {{"deepseek_r1", kThink},
     {"deepseek_v3", think_or_call("", /*by_default=*/false)},
     {"deepseek_v4", think_or_call("<｜DSML｜tool_calls>", /*by_default=*/false)},
     {"glm45", kThink},
     {"glm47", kThink},
     {"holo2", kThink},
     {"kimi_k2", think_or_call("<|tool_calls_section_begin|>")},
     {"mimo", kQwen3},
     {"minimax_m2", kThink},
     {"minimax_m2_append_think", {.begin = kThink.begin, .end = kThink.end, .as_content = true}},
     {"mistral", {.begin = "[THINK]", .end = "[/THINK]", .by_default = false}},
     {"nemotron_v3", kThink},
     {"olmo3", kThink},
     {"openai_gptoss", {}},
     {"qwen3", kQwen3},
     {"seed_oss", {.begin = "<seed:think>", .end = "</seed:think>"}},
     {"step3", kThink}}};

}  // namespace

std::optional<ReasoningFormat> reasoning_format(std::string_view name) {
  for (const auto& [known, format] : kReasoningFormats)
    if (name == known) return format;
  return std::nullopt;
}

std::vector<std::string> reasoning_format_names() {
  std::vector<std::string> names;
  for (const auto& [name, format] : kReasoningFormats) names.emplace_back(name);
  return names;
}

// Answers of earlier turns may have markers, too: only the last one, and at the end of a prompt
// that ends before the answer, is of this answer.
std::optional<Thoughts> thoughts_behind(const ReasoningPrompt& prompt,
                                        const ReasoningFormat& format) {
  const auto text = trimmed(prompt.text);
  const auto begin = text.rfind(format.begin), end = text.rfind(format.end);
  const auto says = [&](std::size_t at, std::string_view marker) {
    return at != std::string_view::npos && (prompt.is_answer || at + marker.size() == text.size());
  };
  const bool begins = says(begin, format.begin), ends = says(end, format.end);
  if (ends && (!begins || begin < end)) return std::nullopt;
  return Thoughts{.format = format,
                  .are_certain = begins || prompt.may_think.value_or(format.by_default)};
}

}  // namespace ferry::rollout::text
