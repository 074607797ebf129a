// Reads a model's answer as it comes: its thoughts, and the content and the calls of tools behind
// them. Calls within thoughts are none.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "rollout/text/reasoning_format.h"
#include "rollout/text/tool_calls.h"

namespace ferry::rollout::text {

class AnswerReader {
 public:
  // Without thoughts or a format all is content. `tools`: as of ToolCallParser.
  AnswerReader(std::optional<Thoughts> thoughts,
               std::optional<ToolFormat> tool_format,
               const nlohmann::ordered_json& tools);

  // Takes text; returns what is certain now.
  AnswerPart take(std::string_view text);
  // The rest, at the end of the text.
  AnswerPart finish();

 private:
  // kAnswer is between the format's markers of an answer, kContent is all behind them.
  enum class State : std::uint8_t { kBegin, kThoughts, kBeforeAnswer, kAnswer, kContent };

  void read(bool is_last, AnswerPart& part);
  bool begin(bool is_last, AnswerPart& part);
  void give_thoughts(bool is_last, AnswerPart& part);
  bool begin_answer(bool is_last);
  void give_answer(bool is_last, AnswerPart& part);
  void give(std::string_view text, AnswerPart& part);

  std::optional<Thoughts> thoughts_;
  std::optional<ToolCallParser> calls_{};
  State state_;
  std::string pending_{};  // text that may be a part of a marker
};

// The parts of a whole answer.
AnswerPart read_answer(std::string_view text,
                       std::optional<Thoughts> thoughts,
                       std::optional<ToolFormat> tool_format,
                       const nlohmann::ordered_json& tools);

}  // namespace ferry::rollout::text
