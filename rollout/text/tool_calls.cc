#include "rollout/text/tool_calls.h"

#include <algorithm>
#include <utility>

#include "distckpt/base/trimmed.h"

namespace ferry::rollout::text {

using nlohmann::ordered_json;

namespace {

constexpr std::size_t kLongestString = 65536;  // bytes behind an end that may be within it

// True if JSON lies between the markers: a body of Hermes may also be tags, or keys and values.
bool is_json(ToolFormat format, std::string_view body) {
  if (format == ToolFormat::kHermes) return trimmed(body).starts_with('{');
  return format == ToolFormat::kKimiK2 || format == ToolFormat::kDeepSeekV3 ||
         format == ToolFormat::kDeepSeekV31;
}

// Goes on with a text whose beginnings it has seen.
class StringsOfJson {
 public:
  bool in_string_at(std::string_view text, std::size_t to) {
    for (; at_ < to; ++at_) {
      if (!escaped_ && text[at_] == '"') in_string_ = !in_string_;
      escaped_ = !escaped_ && text[at_] == '\\';
    }
    return in_string_;
  }

 private:
  std::size_t at_ = 0;
  bool in_string_ = false;
  bool escaped_ = false;
};

// The end of the call with which the text begins; npos: it may be still to come. An end inside a
// string of JSON, as of a model that writes about calls, is one only if no later one ends a call
// that parses: a quote that is missing hides the calls behind it no further than that.
std::size_t end_of_call(const std::string& text,
                        std::string_view end,
                        ToolFormat format,
                        const ToolCallBody& body,
                        bool is_last) {
  const auto first = text.find(end);
  if (first == std::string::npos || !is_json(format, text)) return first;
  StringsOfJson strings;
  for (auto at = first; at != std::string::npos; at = text.find(end, at + end.size())) {
    if (at - first >= kLongestString) return first;
    if (strings.in_string_at(text, at)) continue;
    std::vector<ToolCall> unused;
    return at == first || body.read(std::string_view(text).substr(0, at), unused) ? at : first;
  }
  const bool waits = text.size() - first < kLongestString + end.size();
  return waits && !is_last ? std::string::npos : first;
}

}  // namespace

ToolCallParser::ToolCallParser(ToolFormat format, const ordered_json& tools)
    : format_(format), markers_(markers_of(format)), body_(format, tools) {
  if (has_channels(format)) harmony_.emplace(/*finds_calls=*/!tools.empty());
}

ToolCallParser::Part ToolCallParser::take(std::string_view text) {
  Part part;
  if (harmony_) {
    harmony_->take(text, /*is_last=*/false, part);
    return part;
  }
  pending_ += text;
  scan(false, part);
  return part;
}

ToolCallParser::Part ToolCallParser::finish() {
  Part part;
  if (harmony_)
    harmony_->take("", /*is_last=*/true, part);
  else
    scan(true, part);
  return part;
}

void ToolCallParser::scan(bool is_last, Part& part) {
  if (format_ == ToolFormat::kLlama3Json) {
    const auto text = trimmed(pending_);
    const bool may_be_call = text.empty() || text[0] == '{' || text.starts_with(markers_.begin) ||
                             markers_.begin.starts_with(text);
    if (!is_content_ && may_be_call && !is_last) return;
    if (!is_content_ && ToolCallBody::read_json_calls(text, part.calls)) return pending_.clear();
    is_content_ = true;
    part.content = std::exchange(pending_, "");
    return;
  }
  const auto begin = markers_.begin, end = markers_.end;
  while (true) {
    if (!in_call_) {
      const auto at = pending_.find(begin);
      if (at == std::string::npos) break;
      give_content(std::string_view(pending_).substr(0, at), false, part);
      pending_.erase(0, at + begin.size());
      in_call_ = true;
    }
    const auto at = end_of_call(pending_, end, format_, body_, is_last);
    if (at == std::string::npos) break;
    const auto body = pending_.substr(0, at);
    pending_.erase(0, at + end.size());
    in_call_ = false;
    if (body_.read(body, part.calls)) {
      space_.clear();
      has_called_ = true;
    } else {
      give_content(std::string(begin) + body + std::string(end), is_last, part);
    }
  }
  if (in_call_) {
    if (!is_last) return;
    in_call_ = false;
    return give_content(std::string(begin) + std::exchange(pending_, ""), true, part);
  }
  auto held = is_last ? 0 : beginning_at_end(pending_, begin);
  if (!is_last)
    for (const auto frame : markers_.frames)
      held = std::max(held, beginning_at_end(pending_, frame));
  const auto certain = pending_.substr(0, pending_.size() - held);
  pending_.erase(0, certain.size());
  give_content(certain, is_last, part);
}

// Goes from left to right: what is left of the text makes no frame.
std::string ToolCallParser::without_frames(std::string_view text) const {
  std::string kept;
  while (!text.empty()) {
    const auto frame = std::ranges::find_if(
        markers_.frames, [&](std::string_view one) { return text.starts_with(one); });
    if (frame == markers_.frames.end()) kept += text.front();
    text.remove_prefix(frame == markers_.frames.end() ? 1 : frame->size());
  }
  return kept;
}

// White space before and between calls is no content.
void ToolCallParser::give_content(std::string_view text, bool is_last, Part& part) {
  auto all = space_ + std::string(text);
  space_.clear();
  if (!markers_.frames.empty()) all = without_frames(all);
  const auto end = all.find_last_not_of(" \t\r\n");
  const auto kept = end == std::string::npos ? 0 : end + 1;
  const bool keeps_space = is_last && !has_called_;
  if (!keeps_space) {
    space_ = all.substr(kept);
    all.resize(kept);
  }
  part.content += all;
}

}  // namespace ferry::rollout::text
