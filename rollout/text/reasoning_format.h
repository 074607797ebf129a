// The thoughts that some models write in front of an answer, between two markers. The formats have
// the names of vLLM's parsers; those of GPT-OSS are on a channel (harmony.h).
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ferry::rollout::text {

struct ReasoningFormat {
  std::string_view begin{};  // a template may write it at the end of the prompt
  std::string_view end{};
  std::string_view call{};  // the beginning of a call, which ends thoughts as well; empty: none
  bool by_default = true;   // thoughts come first where neither the prompt nor the answer says so
  bool as_content = false;  // thoughts are content, between their markers
  bool on_channel() const { return begin.empty(); }
};

// `name`: one of reasoning_format_names(). Nothing for another one.
std::optional<ReasoningFormat> reasoning_format(std::string_view name);
std::vector<std::string> reasoning_format_names();

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

}  // namespace ferry::rollout::text
