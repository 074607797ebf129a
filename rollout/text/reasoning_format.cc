#include "rollout/text/reasoning_format.h"

#include <nlohmann/json.hpp>

#include "distckpt/base/trimmed.h"

namespace ferry::rollout::text {

// Answers of earlier turns may have markers, too: only the last one, and at the end of a prompt
// that ends before the answer, is of this answer.
std::optional<Thoughts> thoughts_behind(const ReasoningPrompt& prompt,
                                        const ReasoningFormat& format) {
  const auto text = trimmed(prompt.text);
  const auto begin_marker = trimmed(format.begin), end_marker = trimmed(format.end);
  const auto begin = text.rfind(begin_marker), end = text.rfind(end_marker);
  const auto says = [&](std::size_t at, std::string_view marker) {
    return at != std::string_view::npos && (prompt.is_answer || at + marker.size() == text.size());
  };
  const bool begins = says(begin, begin_marker), ends = says(end, end_marker);
  if (ends && (!begins || begin < end)) return std::nullopt;
  return Thoughts{.format = format,
                  .are_certain = begins || prompt.may_think.value_or(format.by_default)};
}

std::optional<bool> may_think(const nlohmann::ordered_json& variables) {
  std::optional<bool> found;
  for (const char* name : {"enable_thinking", "thinking"})
    if (const auto given = variables.find(name); given != variables.end() && given->is_boolean())
      found = found.value_or(false) || *given == true;
  return found;
}

}  // namespace ferry::rollout::text
