// Finds calls of tools in a model's text as it comes. The text has its special tokens: some
// tokenizers make such of the markers around calls.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "rollout/text/harmony.h"
#include "rollout/text/tool_call_body.h"
#include "rollout/text/tool_format.h"

namespace ferry::rollout::text {

class ToolCallParser {
 public:
  // `tools`: of the request, whose schemas say which arguments are strings where a format does not;
  // may be null, and then answers on channels (kOpenAi) have no calls.
  ToolCallParser(ToolFormat format, const nlohmann::ordered_json& tools);

  using Part = AnswerPart;
  // Takes text; returns what is certain now.
  Part take(std::string_view text);
  // The rest, at the end of the text. A call without an end or that does not parse is content.
  Part finish();

 private:
  void scan(bool is_last, Part& part);
  void give_content(std::string_view text, bool is_last, Part& part);
  std::string without_frames(std::string_view text) const;

  ToolFormat format_;
  ToolMarkers markers_;
  ToolCallBody body_;
  std::optional<HarmonyReader> harmony_{};  // kOpenAi
  std::string pending_{};                   // text that may become a call
  std::string space_{};                     // white space, which goes if a call follows
  bool in_call_ = false;
  bool has_called_ = false;
  bool is_content_ = false;  // kLlama3Json: the text is no call
};

}  // namespace ferry::rollout::text
