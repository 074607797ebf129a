#include "rollout/text/harmony.h"

#include <algorithm>
#include <array>
#include <utility>

#include "distckpt/base/trimmed.h"

namespace ferry::rollout::text {
namespace {

constexpr std::string_view kStartOfMessage = "<|start|>", kChannel = "<|channel|>",
                           kEndOfHeader = "<|message|>";
constexpr std::array<std::string_view, 3> kHeaderOpenings{kStartOfMessage, kChannel, "to="};
// The last one ends no message: another begins where the end is missing.
constexpr std::array<std::string_view, 4> kEndsOfMessages{kEndOfMessage, "<|call|>", "<|return|>",
                                                          kStartOfMessage};

struct FoundEnd {
  std::size_t at = std::string_view::npos;
  std::string_view marker{};
};

FoundEnd first_end(std::string_view text, std::size_t from) {
  FoundEnd first;
  for (const auto marker : kEndsOfMessages) {
    const auto at = text.find(marker, from);
    if (at < first.at) first = {at, marker};
  }
  return first;
}

// The word behind `key`, if the text has it.
std::string_view word_behind(std::string_view text, std::string_view key) {
  const auto at = text.find(key);
  if (at == std::string_view::npos) return {};
  const auto word = trimmed(text.substr(at + key.size()));
  return word.substr(0, word.find_first_of(" \t\r\n<"));
}

}  // namespace

void name_thinking(nlohmann::ordered_json& messages) {
  for (auto& message : messages) {
    const auto reasoning = message.find("reasoning_content");
    if (reasoning == message.end() || !reasoning->is_string() || *reasoning == "" ||
        message.contains("thinking"))
      continue;
    message["thinking"] = *reasoning;
    const auto calls = message.find("tool_calls");
    if (calls != message.end() && !calls->empty()) message["content"] = "";
  }
}

void HarmonyReader::take(std::string_view text, bool is_last, AnswerPart& part) {
  pending_ += text;
  while (step(is_last, part)) {
  }
  if (is_last) part.content += std::exchange(pending_, "");
}

// False: more text is needed.
bool HarmonyReader::step(bool is_last, AnswerPart& part) {
  switch (state_) {
    case State::kBetween:
      return begin_message(is_last);
    case State::kHeader:
      return end_header(part);
    case State::kBody:
      return end_body(is_last, part);
  }
  return false;
}

// The chat template has written the beginning of the first header. Text without one is content.
bool HarmonyReader::begin_message(bool is_last) {
  const auto space = pending_.find_first_not_of(" \t\r\n");
  if (space == std::string::npos) return false;
  const auto text = std::string_view(pending_).substr(space);
  const auto begins = [&](std::string_view one) { return text.starts_with(one); };
  const auto may_begin = [&](std::string_view one) { return one.starts_with(text); };
  is_begun_ = false;
  header_.clear();
  if (std::ranges::any_of(kHeaderOpenings, begins)) {
    pending_.erase(0, space);
    state_ = State::kHeader;
    return true;
  }
  if (!is_last && std::ranges::any_of(kHeaderOpenings, may_begin)) return false;
  kind_ = Kind::kContent;
  state_ = State::kBody;
  return true;
}

bool HarmonyReader::end_header(AnswerPart& part) {
  const auto at = pending_.find(kEndOfHeader);
  const auto end = first_end(pending_, 1);
  if (end.at < at) {  // a header without a message
    const auto size = end.marker == kStartOfMessage ? end.at : end.at + end.marker.size();
    part.content += pending_.substr(0, size);
    pending_.erase(0, size);
    state_ = State::kBetween;
    return true;
  }
  if (at == std::string::npos) return false;
  read_header(std::string_view(pending_).substr(0, at));
  header_ = pending_.substr(0, at + kEndOfHeader.size());
  pending_.erase(0, header_.size());
  state_ = State::kBody;
  return true;
}

void HarmonyReader::read_header(std::string_view header) {
  constexpr std::string_view kFunctions = "functions.";
  const auto channel = word_behind(header, kChannel);
  recipient_ = word_behind(header, "to=");
  if (recipient_.starts_with(kFunctions) && recipient_.size() > kFunctions.size()) {
    recipient_.erase(0, kFunctions.size());
    kind_ = Kind::kCall;
  } else if (!recipient_.empty()) {
    kind_ = Kind::kOther;
  } else {
    kind_ = channel == "analysis"                                              ? Kind::kReasoning
            : channel == "final" || channel == "commentary" || channel.empty() ? Kind::kContent
                                                                               : Kind::kOther;
  }
}

bool HarmonyReader::end_body(bool is_last, AnswerPart& part) {
  const bool is_text = kind_ == Kind::kContent || kind_ == Kind::kReasoning;
  const auto end = first_end(pending_, 0);
  if (end.at == std::string_view::npos && !is_last && !is_text) return false;
  auto size = std::min(end.at, pending_.size());
  if (end.at == std::string_view::npos && !is_last) {
    std::size_t held = 0;
    for (const auto marker : kEndsOfMessages)
      held = std::max(held, beginning_at_end(pending_, marker));
    size -= held;
  }
  const auto body = pending_.substr(0, size);
  const auto marker = end.marker == kStartOfMessage ? "" : end.marker;
  pending_.erase(0, size + marker.size());
  if (is_text)
    give(body, part);
  else
    give_whole(body, marker, part);
  if (end.at == std::string_view::npos) return false;
  state_ = State::kBetween;
  return true;
}

// A line break parts two messages of a kind.
void HarmonyReader::give(std::string_view body, AnswerPart& part) {
  if (body.empty()) return;
  const bool is_content = kind_ == Kind::kContent;
  auto& text = is_content ? part.content : part.reasoning;
  auto& has_text = is_content ? has_content_ : has_reasoning_;
  if (!std::exchange(is_begun_, true) && std::exchange(has_text, true)) text += '\n';
  text += body;
}

void HarmonyReader::give_whole(std::string_view body, std::string_view end, AnswerPart& part) {
  auto arguments =
      kind_ == Kind::kCall && finds_calls_ ? object_text(body) : std::optional<std::string>();
  if (arguments) {
    part.calls.push_back({recipient_, std::move(*arguments)});
  } else {
    part.content.append(header_).append(body).append(end);
  }
  header_.clear();
}

}  // namespace ferry::rollout::text
