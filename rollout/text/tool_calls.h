// Finds calls of tools in a model's text as it comes. The text has its special tokens: some
// tokenizers make such of the markers around calls.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "rollout/text/harmony.h"
#include "rollout/text/object_scanner.h"
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
  // The rest, at the end of the text. A call that does not parse is content, and so is one without
  // an end unless all of it is there.
  Part finish();

 private:
  void scan(bool is_last, Part& part);
  void scan_objects(bool is_last, Part& part);
  // Takes what is before a call and the marker, and returns true, where a call begins.
  bool begin_call(Part& part);
  // Takes a call that ends, or that the text ends in; false if it goes on.
  bool end_call(bool is_last, Part& part);
  std::size_t held_at_end() const;
  std::size_t size_of_content(std::string_view text) const;
  void give_content(std::string_view text, bool is_last, Part& part);
  std::string without_frames(std::string_view text) const;

  ToolFormat format_;
  ToolMarkers markers_;
  ToolCallBody body_;
  std::optional<HarmonyReader> harmony_{};  // kOpenAi
  std::string pending_{};                   // text that may become a call
  std::string space_{};                     // white space, which goes if a call follows
  std::string_view begin_{};                // of the call
  ObjectScanner object_{};                  // kLlama3Json: of the object that pending_ begins with
  bool in_call_ = false;
  bool has_called_ = false;
  bool is_behind_call_ = false;  // with nothing between
};

}  // namespace ferry::rollout::text
