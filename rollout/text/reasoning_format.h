// The thoughts that some models write in front of an answer, between two markers. The formats have
// the names of vLLM's parsers; those of GPT-OSS are on a channel (harmony.h).
#pragma once

#include <array>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "distckpt/base/named.h"

namespace ferry::rollout::text {

struct ReasoningFormat {
  std::string_view begin{};  // a template may write it at the end of the prompt
  std::string_view end{};
  std::string_view call{};  // the beginning of a call, which ends thoughts as well; empty: none
  bool by_default = true;   // thoughts come first where neither the prompt nor the answer says so
  bool as_content = false;  // thoughts are content, between their markers
  std::string_view other_begin{};  // in place of `begin`; empty: none
  std::string_view other_end{};
  // Around what follows the thoughts, with line breaks inside, if the model writes them.
  std::string_view begin_of_answer{};
  std::string_view end_of_answer{};
  bool on_channel() const { return begin.empty(); }
};

namespace reasoning_formats {

inline constexpr ReasoningFormat kThink{.begin = "<think>", .end = "</think>"};
constexpr ReasoningFormat think_or_call(std::string_view call, bool by_default = true) {
  auto format = kThink;
  format.call = call;
  format.by_default = by_default;
  return format;
}
constexpr ReasoningFormat think_and_answer(std::string_view begin, std::string_view end) {
  auto format = kThink;
  format.begin_of_answer = begin;
  format.end_of_answer = end;
  return format;
}
inline constexpr ReasoningFormat kQwen3 = think_or_call("<tool_call>\n<function=");

}  // namespace reasoning_formats

inline constexpr auto kReasoningFormats = std::to_array<Named<ReasoningFormat>>({
    {"deepseek_r1", reasoning_formats::kThink},
    {"deepseek_v3", reasoning_formats::think_or_call("", /*by_default=*/false)},
    {"deepseek_v4", reasoning_formats::think_or_call("<｜DSML｜tool_calls>", /*by_default=*/false)},
    {"ernie45", reasoning_formats::think_and_answer("<response>", "</response>")},
    {"gemma4", {.begin = "<|channel>thought\n", .end = "<channel|>", .by_default = false}},
    {"glm45", reasoning_formats::kThink},
    {"glm47", reasoning_formats::kThink},
    {"granite",
     {.begin = "Here is my thought process:",
      .end = "Here is my response:",
      .by_default = false,
      .other_begin = "Here's my thought process:",
      .other_end = "Here's my response:"}},
    {"holo2", reasoning_formats::kThink},
    {"hunyuan_a13b",
     {.begin = "<think>\n",
      .end = "\n</think>\n",
      .by_default = false,
      .begin_of_answer = "<answer>",
      .end_of_answer = "</answer>"}},
    {"kimi_k2", reasoning_formats::think_or_call("<|tool_calls_section_begin|>")},
    {"mimo", reasoning_formats::kQwen3},
    {"minimax_m2", reasoning_formats::kThink},
    {"minimax_m2_append_think", {.begin = "<think>", .end = "</think>", .as_content = true}},
    {"mistral", {.begin = "[THINK]", .end = "[/THINK]", .by_default = false}},
    {"nemotron_v3", reasoning_formats::kThink},
    {"olmo3", reasoning_formats::kThink},
    {"openai_gptoss", {}},
    {"qwen3", reasoning_formats::kQwen3},
    {"seed_oss", {.begin = "<seed:think>", .end = "</seed:think>"}},
    {"step3", reasoning_formats::kThink},
});

// The thoughts that an answer may begin with.
struct Thoughts {
  ReasoningFormat format{};
  bool are_certain = true;  // or else there are some only if the answer begins with format.begin
};

// The prompt of an answer, as far as its thoughts go.
struct ReasoningPrompt {
  std::string_view text{};          // or its end
  bool is_answer = false;           // it ends within the answer, which goes on
  std::optional<bool> may_think{};  // the template was told so
};
// Nothing behind a prompt that ends the thoughts: templates write both markers to have none.
std::optional<Thoughts> thoughts_behind(const ReasoningPrompt& prompt,
                                        const ReasoningFormat& format);

// The tokens at the end of a prompt that a template may have written behind the last message.
inline constexpr std::size_t kGenerationPrompt = 16;
// ReasoningPrompt::may_think, of the variables of a chat template: an object.
std::optional<bool> may_think(const nlohmann::ordered_json& variables);

}  // namespace ferry::rollout::text
