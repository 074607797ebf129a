#include "rollout/text/tool_calls.h"

#include <algorithm>
#include <utility>

#include "distckpt/base/trimmed.h"

namespace ferry::rollout::text {

using nlohmann::ordered_json;

namespace {

// A call of kQwen3Coder may begin without its marker.
constexpr std::string_view kFunction = "<function=";
constexpr std::size_t kLongestString = 65536;  // bytes behind an end that may be within it

// True if JSON lies between the markers: a body of Hermes may also be tags, or keys and values.
bool is_json(ToolFormat format, std::string_view body) {
  if (format == ToolFormat::kHermes) return trimmed(body).starts_with('{');
  return format == ToolFormat::kKimiK2 || format == ToolFormat::kDeepSeekV3 ||
         format == ToolFormat::kDeepSeekV31 || format == ToolFormat::kHunyuan;
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

// The size of the body with which the text begins; npos: its end may be still to come. An end
// inside a string of JSON, as of a model that writes about calls, is one only if no later one ends
// a call that parses: a quote that is missing hides the calls behind it no further than that.
std::size_t body_of_call(const std::string& text,
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

// The place of the JSON in a call that has no marker behind it; npos: it may be still to come.
// Nothing if what comes is none.
std::optional<std::size_t> json_in_call(ToolFormat format, std::string_view text) {
  constexpr std::string_view kOpen = "{[", kArguments = "[ARGS]", kId = "[CALL_ID]";
  constexpr std::size_t kLongestName = 256;
  const auto begin = text.find_first_not_of(" \t\r\n");
  if (begin == text.npos || text[begin] == '[') return begin;
  if (format != ToolFormat::kMistral) return std::nullopt;
  auto at = text.find_first_of(kOpen, begin);
  while (at != text.npos && text[at] == '[') {
    const auto rest = text.substr(at);
    if (kArguments.starts_with(rest) || kId.starts_with(rest)) return text.npos;
    if (!rest.starts_with(kArguments) && !rest.starts_with(kId)) return std::nullopt;
    at = text.find_first_of(kOpen, at + (rest.starts_with(kId) ? kId : kArguments).size());
  }
  if (at == text.npos && text.size() > kLongestName) return std::nullopt;
  return at;
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
  if (format_ == ToolFormat::kLlama3Json) return scan_objects(is_last, part);
  if (format_ == ToolFormat::kPythonic) return scan_python(is_last, part);
  while (in_call_ || begin_call(part))
    if (!end_call(is_last, part)) return;
  const auto certain = pending_.substr(0, pending_.size() - (is_last ? 0 : held_at_end()));
  pending_.erase(0, certain.size());
  give_content(certain, is_last, part);
}

bool ToolCallParser::begin_call(Part& part) {
  begin_ = markers_.begin;
  auto at = pending_.find(begin_);
  const auto other = format_ == ToolFormat::kQwen3Coder ? kFunction : markers_.other_begin;
  if (const auto found = other.empty() ? pending_.npos : pending_.find(other); found < at) {
    at = found;
    begin_ = other;
  }
  if (at == std::string::npos) return false;
  give_content(std::string_view(pending_).substr(0, at), false, part);
  pending_.erase(0, at + (begin_ == kFunction ? 0 : begin_.size()));
  return in_call_ = true;
}

ToolCallParser::CallEnd ToolCallParser::end_of_call(bool is_last) {
  const auto& marker = markers_.end;
  if (marker.empty()) return end_of_json(is_last);
  if (begin_ != kFunction) {
    const auto size = body_of_call(pending_, marker, format_, body_, is_last);
    return size == pending_.npos ? CallEnd() : CallEnd{size, size + marker.size()};
  }
  // The marker behind a call that begins with kFunction may be there or not.
  constexpr std::string_view kEnd = "</function>";
  const auto at = pending_.find(kEnd);
  if (at == pending_.npos) return {};
  const auto size = at + kEnd.size();
  const auto rest = trimmed(std::string_view(pending_).substr(size));
  if (rest.starts_with(marker)) return {size, pending_.find(marker, size) + marker.size()};
  if (!is_last && marker.starts_with(rest)) return {};
  return {size, size};
}

// A call that no JSON follows has no body, and its marker is content.
ToolCallParser::CallEnd ToolCallParser::end_of_json(bool is_last) {
  const auto at = json_in_call(format_, pending_);
  if (at == pending_.npos) return {};
  const auto state =
      at ? object_.scan(std::string_view(pending_).substr(*at)) : ObjectScanner::State::kNone;
  const auto end = state == ObjectScanner::State::kWhole ? *at + object_.end() : 0;
  if (state == ObjectScanner::State::kOpen && !is_last) return {};
  object_ = {};
  return {end, end};
}

bool ToolCallParser::end_call(bool is_last, Part& part) {
  const std::string begin(begin_ == kFunction ? "" : begin_);
  const auto [size, end] = end_of_call(is_last);
  if (size == std::string::npos && !is_last) return false;
  const bool has_end = size != std::string::npos;
  const auto body = pending_.substr(0, size);
  const auto whole = begin + pending_.substr(0, has_end ? end : size);
  pending_.erase(0, has_end ? end : size);
  in_call_ = false;
  if (has_end ? body_.read(body, part.calls) : body_.read_last(body, part.calls)) {
    space_.clear();
    has_called_ = true;
  } else {
    give_content(whole, is_last, part);
  }
  return true;
}

// The size of what may become a marker when more text comes.
std::size_t ToolCallParser::held_at_end() const {
  auto held = beginning_at_end(pending_, markers_.begin);
  const auto other = format_ == ToolFormat::kQwen3Coder ? kFunction : markers_.other_begin;
  if (!other.empty()) held = std::max(held, beginning_at_end(pending_, other));
  for (const auto frame : markers_.frames) held = std::max(held, beginning_at_end(pending_, frame));
  return held;
}

// Objects that are calls are found anywhere in the text, as in vLLM. One that is none is content
// with all that is in it.
void ToolCallParser::scan_objects(bool is_last, Part& part) {
  while (true) {
    const auto at = pending_.find('{');
    if (at == std::string::npos) break;
    if (at > 0) give_content(std::string_view(pending_).substr(0, at), false, part);
    pending_.erase(0, at);
    const auto state = object_.scan(pending_);
    if (state == ObjectScanner::State::kOpen && !is_last) return;
    const auto end = state == ObjectScanner::State::kWhole ? object_.end() : 1;
    object_ = {};
    const auto text = pending_.substr(0, end);
    pending_.erase(0, end);
    if (end > 1 && body_.read(text, part.calls)) {
      space_.clear();
      has_called_ = is_behind_call_ = true;
    } else {
      give_content(text, is_last && pending_.empty(), part);
    }
  }
  const auto held = is_last ? 0 : held_at_end();
  const auto certain = pending_.substr(0, pending_.size() - held);
  pending_.erase(0, certain.size());
  give_content(certain, is_last, part);
}

// Nothing says where a list that is the whole text ends, but the end of the text.
void ToolCallParser::scan_python(bool is_last, Part& part) {
  const auto begin = markers_.frames[0], end = markers_.frames[1];
  auto text = trimmed(pending_);
  const bool may_begin = begin.starts_with(text);
  if (text.starts_with(begin)) text = trimmed(text.substr(begin.size()));
  const bool may_call = !has_content_ && (may_begin || text.empty() || text.starts_with('['));
  if (may_call && !is_last) return;
  if (text.ends_with(end)) text.remove_suffix(end.size());
  if (may_call && body_.read(text, part.calls)) return pending_.clear();
  has_content_ = true;
  part.content += std::exchange(pending_, "");
}

// Without white space at the end, which is no content where a call follows; in kLlama3Json neither
// is the marker in front of one, nor semicolons between two.
std::size_t ToolCallParser::size_of_content(std::string_view text) const {
  constexpr std::string_view kSpace = " \t\r\n";
  const bool has_objects = format_ == ToolFormat::kLlama3Json;
  while (true) {
    text = text.substr(0, text.find_last_not_of(kSpace) + 1);
    if (!has_objects || !text.ends_with(markers_.begin)) break;
    text.remove_suffix(markers_.begin.size());
  }
  const bool is_separator = has_objects && is_behind_call_ &&
                            text.find_first_not_of(" \t\r\n;") == std::string_view::npos;
  return is_separator ? 0 : text.size();
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
  const auto kept = size_of_content(all);
  if (kept > 0) is_behind_call_ = false;
  const bool keeps_space = is_last && !has_called_;
  if (!keeps_space) {
    space_ = all.substr(kept);
    all.resize(kept);
  }
  part.content += all;
}

}  // namespace ferry::rollout::text
