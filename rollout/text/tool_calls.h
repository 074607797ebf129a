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
  // The ends of a call's body and of the marker behind it; npos if they may be still to come.
  struct CallEnd {
    std::size_t body = std::string::npos;
    std::size_t marker = std::string::npos;
  };

  void scan(bool is_last, Part& part);
  void scan_objects(bool is_last, Part& part);
  void scan_python(bool is_last, Part& part);
  // Takes what is before a call and the marker, and returns true, where a call begins.
  bool begin_call(Part& part);
  CallEnd end_of_call(bool is_last);
  CallEnd end_of_json(bool is_last);
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
  ObjectScanner object_{};                  // of the JSON in pending_ that has no marker behind it
  bool in_call_ = false;
  bool has_called_ = false;
  bool has_content_ = false;     // kPythonic: the text is no list of calls
  bool is_behind_call_ = false;  // with nothing between
};

}  // namespace ferry::rollout::text
