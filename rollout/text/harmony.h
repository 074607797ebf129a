// Answers of GPT-OSS: messages with a header each, which names a channel and perhaps a recipient.
//
//   <|channel|>analysis<|message|>reasoning<|end|>
//   <|start|>assistant<|channel|>final<|message|>content<|return|>
//   <|start|>assistant<|channel|>commentary to=functions.name
//   <|constrain|>json<|message|>{}<|call|>
//
// OpenAI's package openai-harmony reads them alike.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "rollout/text/tool_call_body.h"

namespace ferry::rollout::text {

// Ends a message that another one follows.
inline constexpr std::string_view kEndOfMessage = "<|end|>";

// A part of an answer.
struct AnswerPart {
  std::string content{};    // text that belongs to no call
  std::string reasoning{};  // thoughts; of kOpenAi the channel analysis
  std::vector<ToolCall> calls{};
};

// The reasoning of a conversation's answers (`reasoning_content`) under the name that GPT-OSS's
// template has for it. An answer with calls shows the template either reasoning or content.
void name_thinking(nlohmann::ordered_json& messages);

class HarmonyReader {
 public:
  // `finds_calls`: otherwise calls are content.
  explicit HarmonyReader(bool finds_calls) : finds_calls_(finds_calls) {}

  // Takes text, and adds what is certain now. `is_last`: nothing follows.
  void take(std::string_view text, bool is_last, AnswerPart& part);

 private:
  enum class State : std::uint8_t { kBetween, kHeader, kBody };
  enum class Kind : std::uint8_t { kContent, kReasoning, kCall, kOther };

  bool step(bool is_last, AnswerPart& part);
  bool begin_message(bool is_last);
  bool end_header(AnswerPart& part);
  bool end_body(bool is_last, AnswerPart& part);
  void read_header(std::string_view header);
  void give(std::string_view body, AnswerPart& part);
  void give_whole(std::string_view body, std::string_view end, AnswerPart& part);

  bool finds_calls_;
  State state_ = State::kBetween;
  Kind kind_ = Kind::kContent;
  std::string pending_{};
  std::string header_{};     // of the message, with <|message|>
  std::string recipient_{};  // of kCall: the function
  bool is_begun_ = false;    // the message has text
  bool has_content_ = false, has_reasoning_ = false;
};

}  // namespace ferry::rollout::text
