#include "rollout/text/tool_calls.h"

#include <algorithm>
#include <utility>

#include "distckpt/base/trimmed.h"

namespace ferry::rollout::text {

using nlohmann::ordered_json;

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
    const auto at = pending_.find(end);
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
