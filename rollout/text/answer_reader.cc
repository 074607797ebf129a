#include "rollout/text/answer_reader.h"

#include <algorithm>
#include <initializer_list>
#include <iterator>
#include <utility>

namespace ferry::rollout::text {
namespace {

constexpr std::string_view kBlanks = " \t\r\n";

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
  read(/*is_last=*/false, part);
  return part;
}

AnswerPart AnswerReader::finish() {
  AnswerPart part;
  read(/*is_last=*/true, part);
  if (calls_) append(part, calls_->finish());
  return part;
}

void AnswerReader::read(bool is_last, AnswerPart& part) {
  if (state_ == State::kBegin && !begin(is_last, part)) return;
  if (state_ == State::kThoughts) give_thoughts(is_last, part);
  if (state_ == State::kBeforeAnswer && !begin_answer(is_last)) return;
  if (state_ == State::kAnswer) give_answer(is_last, part);
  if (state_ == State::kContent) give(std::exchange(pending_, ""), part);
}

void AnswerReader::give(std::string_view text, AnswerPart& part) {
  if (calls_)
    append(part, calls_->take(text));
  else
    part.content += text;
}

// False: more text is needed.
bool AnswerReader::begin(bool is_last, AnswerPart& part) {
  const auto& format = thoughts_->format;
  const auto space = std::min(pending_.find_first_not_of(kBlanks), pending_.size());
  const auto text = std::string_view(pending_).substr(space);
  const auto is_other = !format.other_begin.empty() && text.starts_with(format.other_begin);
  const auto marker = is_other ? format.other_begin : format.begin;
  const bool has_marker = text.starts_with(marker);
  const bool may_begin = format.begin.starts_with(text) || format.other_begin.starts_with(text);
  if (!has_marker && !is_last && may_begin) return false;
  if (has_marker) pending_.erase(0, space + marker.size());
  state_ = has_marker || thoughts_->are_certain ? State::kThoughts : State::kBeforeAnswer;
  if (state_ == State::kThoughts && format.as_content) part.content += format.begin;
  return true;
}

void AnswerReader::give_thoughts(bool is_last, AnswerPart& part) {
  const auto& format = thoughts_->format;
  auto& text = format.as_content ? part.content : part.reasoning;
  std::size_t at = std::string::npos, held = 0;
  std::string_view found;
  for (const auto marker : {format.end, format.other_end, format.call}) {
    if (marker.empty()) continue;
    held = std::max(held, beginning_at_end(pending_, marker));
    if (const auto place = pending_.find(marker); place < at) {
      at = place;
      found = marker;
    }
  }
  if (at == std::string::npos) {
    const auto certain = pending_.size() - (is_last ? 0 : held);
    text += pending_.substr(0, certain);
    pending_.erase(0, certain);
    return;
  }
  const bool is_call = found == format.call;  // which is read with its marker
  text += pending_.substr(0, at);
  if (format.as_content && !is_call) text += found;
  pending_.erase(0, at + (is_call ? 0 : found.size()));
  state_ = State::kBeforeAnswer;
}

// False: more text is needed.
bool AnswerReader::begin_answer(bool is_last) {
  const auto marker = thoughts_->format.begin_of_answer;
  const auto space = std::min(pending_.find_first_not_of(kBlanks), pending_.size());
  const auto text = std::string_view(pending_).substr(space);
  const bool has_marker = !marker.empty() && text.starts_with(marker);
  if (!has_marker && !is_last && marker.starts_with(text) && !marker.empty()) return false;
  if (has_marker) {
    const auto begin = pending_.find_first_not_of('\n', space + marker.size());
    if (begin == std::string::npos && !is_last) return false;
    pending_.erase(0, begin);
  }
  state_ = marker.empty() ? State::kContent : State::kAnswer;
  return true;
}

// Line breaks in front of the marker and white space behind it belong to it.
void AnswerReader::give_answer(bool is_last, AnswerPart& part) {
  const auto marker = thoughts_->format.end_of_answer;
  const auto at = pending_.find(marker);
  const auto end = at != std::string::npos ? at
                   : is_last               ? pending_.size()
                                           : pending_.size() - beginning_at_end(pending_, marker);
  const auto text = std::string_view(pending_).substr(0, end);
  const bool keeps_breaks = is_last && at == std::string::npos;
  const auto certain = keeps_breaks ? text.size() : text.find_last_not_of('\n') + 1;
  give(text.substr(0, certain), part);
  if (at == std::string::npos) {
    pending_.erase(0, certain);
    return;
  }
  const auto rest = pending_.find_first_not_of(kBlanks, at + marker.size());
  pending_.erase(0, certain);
  if (rest == std::string::npos && !is_last) return;
  pending_.erase(0, rest == std::string::npos ? rest : rest - certain);
  state_ = State::kContent;
}

AnswerPart read_answer(std::string_view text,
                       std::optional<Thoughts> thoughts,
                       std::optional<ToolFormat> tool_format,
                       const nlohmann::ordered_json& tools) {
  AnswerReader reader(thoughts, tool_format, tools);
  auto part = reader.take(text);
  append(part, reader.finish());
  return part;
}

}  // namespace ferry::rollout::text
