#include "rollout/text/answer_reader.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace ferry::rollout::text {
namespace {

void append(AnswerPart& part, AnswerPart more) {
  part.content += more.content;
  part.reasoning += more.reasoning;
  std::ranges::move(more.calls, std::back_inserter(part.calls));
}

}  // namespace

AnswerReader::AnswerReader(std::optional<Thoughts> thoughts,
                           std::optional<ToolFormat> tool_format,
                           const nlohmann::ordered_json& tools)
    : thoughts_(thoughts), state_(thoughts ? State::kBegin : State::kContent) {
  if (tool_format) calls_.emplace(*tool_format, tools);
}

AnswerPart AnswerReader::take(std::string_view text) {
  AnswerPart part;
  pending_ += text;
  read_thoughts(/*is_last=*/false, part);
  if (state_ != State::kContent) return part;
  const auto rest = std::exchange(pending_, "");
  if (calls_)
    append(part, calls_->take(rest));
  else
    part.content += rest;
  return part;
}

AnswerPart AnswerReader::finish() {
  AnswerPart part;
  read_thoughts(/*is_last=*/true, part);
  auto rest = std::exchange(pending_, "");
  if (calls_) {
    append(part, calls_->take(rest));
    append(part, calls_->finish());
  } else {
    part.content += rest;
  }
  return part;
}

void AnswerReader::read_thoughts(bool is_last, AnswerPart& part) {
  if (state_ == State::kBegin && !begin(is_last, part)) return;
  if (state_ == State::kThoughts) give_thoughts(is_last, part);
}

// False: more text is needed.
bool AnswerReader::begin(bool is_last, AnswerPart& part) {
  const auto& format = thoughts_->format;
  const auto space = std::min(pending_.find_first_not_of(" \t\r\n"), pending_.size());
  const auto text = std::string_view(pending_).substr(space);
  const bool has_marker = text.starts_with(format.begin);
  if (!has_marker && !is_last && format.begin.starts_with(text)) return false;
  if (has_marker) pending_.erase(0, space + format.begin.size());
  state_ = has_marker || thoughts_->are_certain ? State::kThoughts : State::kContent;
  if (state_ == State::kThoughts && format.as_content) part.content += format.begin;
  return true;
}

void AnswerReader::give_thoughts(bool is_last, AnswerPart& part) {
  const auto& format = thoughts_->format;
  auto& text = format.as_content ? part.content : part.reasoning;
  const auto end = pending_.find(format.end);
  const auto other = format.call.empty() ? format.end : format.call;
  const auto at = std::min(end, pending_.find(other));
  if (at == std::string::npos) {
    const auto held = is_last ? 0
                              : std::max(beginning_at_end(pending_, format.end),
                                         beginning_at_end(pending_, other));
    text += pending_.substr(0, pending_.size() - held);
    pending_.erase(0, pending_.size() - held);
    return;
  }
  text += pending_.substr(0, at);
  if (format.as_content && at == end) text += format.end;
  pending_.erase(0, at + (at == end ? format.end.size() : 0));
  state_ = State::kContent;
}

}  // namespace ferry::rollout::text
