#include "rollout/text/tool_calls.h"

#include <algorithm>
#include <array>
#include <utility>

#include "rollout/text/shallow_json.h"

namespace ferry::rollout::text {
namespace {

using nlohmann::ordered_json;

constexpr std::string_view kPythonTag = "<|python_tag|>";

struct Markers {
  std::string_view begin{};
  std::string_view end{};
};

constexpr std::array<std::pair<std::string_view, ToolFormat>, 6> kFormats{
    {{"hermes", ToolFormat::kHermes},
     {"qwen3_coder", ToolFormat::kQwen3Coder},
     {"glm45", ToolFormat::kGlm45},
     {"llama3_json", ToolFormat::kLlama3Json},
     {"deepseek_v3", ToolFormat::kDeepSeekV3},
     {"deepseek_v31", ToolFormat::kDeepSeekV31}}};

bool is_deepseek(ToolFormat format) {
  return format == ToolFormat::kDeepSeekV3 || format == ToolFormat::kDeepSeekV31;
}

Markers markers_of(ToolFormat format) {
  if (is_deepseek(format)) return {"<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"};
  return {"<tool_call>", "</tool_call>"};
}

// Around all calls of DeepSeek's.
constexpr std::array<std::string_view, 2> kDeepSeekFrames{"<｜tool▁calls▁begin｜>",
                                                          "<｜tool▁calls▁end｜>"};

std::string_view without_space(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n";
  const auto begin = std::min(text.find_first_not_of(kSpace), text.size());
  const auto end = text.find_last_not_of(kSpace);
  return end == std::string_view::npos ? std::string_view() : text.substr(begin, end + 1 - begin);
}

// Goes from left to right: what is left of the text makes no frame.
std::string without_frames(std::string_view text) {
  std::string kept;
  while (!text.empty()) {
    const auto frame = std::ranges::find_if(
        kDeepSeekFrames, [&](std::string_view one) { return text.starts_with(one); });
    if (frame == kDeepSeekFrames.end()) kept += text.front();
    text.remove_prefix(frame == kDeepSeekFrames.end() ? 1 : frame->size());
  }
  return kept;
}

// Bytes that are not UTF-8 become U+FFFD.
std::string as_text(const ordered_json& value) {
  return value.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
}

// The length of the longest suffix of the text that begins `marker`.
std::size_t beginning_at_end(std::string_view text, std::string_view marker) {
  for (auto size = std::min(text.size(), marker.size() - 1); size > 0; --size)
    if (text.ends_with(marker.substr(0, size))) return size;
  return 0;
}

// {"name": ..., "arguments" or "parameters": {...}}
bool read_object(const ordered_json& object, std::vector<ToolCall>& calls) {
  if (!object.is_object() || !object.contains("name") || !object["name"].is_string()) return false;
  for (const char* key : {"arguments", "parameters"}) {
    if (!object.contains(key)) continue;
    auto arguments = object[key];
    if (arguments.is_string()) arguments = parse_shallow_json(arguments.get<std::string>());
    if (!arguments.is_object()) return false;
    calls.push_back({object["name"].get<std::string>(), as_text(arguments)});
    return true;
  }
  calls.push_back({object["name"].get<std::string>(), "{}"});
  return true;
}

// The text between two others, which is cut off with what is before it.
std::optional<std::string_view> take_between(std::string_view& text,
                                             std::string_view begin,
                                             std::string_view end) {
  const auto first = text.find(begin);
  if (first == std::string_view::npos) return std::nullopt;
  const auto last = text.find(end, first + begin.size());
  if (last == std::string_view::npos) return std::nullopt;
  const auto between = text.substr(first + begin.size(), last - first - begin.size());
  text.remove_prefix(last + end.size());
  return between;
}

}  // namespace

std::optional<ToolFormat> tool_format(std::string_view name) {
  for (const auto& [known, format] : kFormats)
    if (name == known) return format;
  return std::nullopt;
}

std::vector<std::string> tool_format_names() {
  std::vector<std::string> names;
  for (const auto& [name, format] : kFormats) names.emplace_back(name);
  return names;
}

std::optional<ToolFormat> tool_format_of_template(std::string_view chat_template) {
  const auto has = [&](std::string_view text) {
    return chat_template.find(text) != std::string_view::npos;
  };
  if (has("<tool_call>"))
    return has("<function=")  ? ToolFormat::kQwen3Coder
           : has("<arg_key>") ? ToolFormat::kGlm45
                              : ToolFormat::kHermes;
  if (has(kDeepSeekFrames[0]))
    return has("```json") ? ToolFormat::kDeepSeekV3 : ToolFormat::kDeepSeekV31;
  if (has("tools") && has("\"parameters\"")) return ToolFormat::kLlama3Json;
  return std::nullopt;
}

bool has_special_markers(ToolFormat format) {
  return format == ToolFormat::kLlama3Json || is_deepseek(format);
}

ToolCallParser::ToolCallParser(ToolFormat format, const ordered_json& tools)
    : format_(format), tools_(tools) {}

ToolCallParser::Part ToolCallParser::take(std::string_view text) {
  Part part;
  pending_ += text;
  scan(false, part);
  return part;
}

ToolCallParser::Part ToolCallParser::finish() {
  Part part;
  scan(true, part);
  return part;
}

void ToolCallParser::scan(bool is_last, Part& part) {
  if (format_ == ToolFormat::kLlama3Json) {
    const auto text = without_space(pending_);
    const bool may_be_call = text.empty() || text[0] == '{' || text.starts_with(kPythonTag) ||
                             kPythonTag.starts_with(text);
    if (!is_content_ && may_be_call && !is_last) return;
    if (!is_content_ && read_json_calls(text, part.calls)) return pending_.clear();
    is_content_ = true;
    part.content = std::exchange(pending_, "");
    return;
  }
  const auto [begin, end] = markers_of(format_);
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
    if (read_call(body, part.calls)) {
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
  if (!is_last && is_deepseek(format_)) {
    for (const auto frame : kDeepSeekFrames)
      held = std::max(held, beginning_at_end(pending_, frame));
  }
  const auto certain = pending_.substr(0, pending_.size() - held);
  pending_.erase(0, certain.size());
  give_content(certain, is_last, part);
}

// White space before and between calls is no content.
void ToolCallParser::give_content(std::string_view text, bool is_last, Part& part) {
  auto all = space_ + std::string(text);
  space_.clear();
  if (is_deepseek(format_)) all = without_frames(all);
  const auto end = all.find_last_not_of(" \t\r\n");
  const auto kept = end == std::string::npos ? 0 : end + 1;
  const bool keeps_space = is_last && !has_called_;
  if (!keeps_space) {
    space_ = all.substr(kept);
    all.resize(kept);
  }
  part.content += all;
}

bool ToolCallParser::read_call(std::string_view body, std::vector<ToolCall>& calls) const {
  body = without_space(body);
  if (is_deepseek(format_)) return read_deepseek_call(body, calls);
  if (body.starts_with("<function=")) return read_function_tag(body, calls);
  if (!body.starts_with('{')) return read_arg_keys(body, calls);
  return read_object(parse_shallow_json(body), calls);
}

// One object, or several with semicolons between them.
bool ToolCallParser::read_json_calls(std::string_view text, std::vector<ToolCall>& calls) const {
  if (text.starts_with(kPythonTag)) text.remove_prefix(kPythonTag.size());
  std::vector<ToolCall> found;
  while (!(text = without_space(text)).empty()) {
    auto end = text.size();
    auto object = parse_shallow_json(text);
    // A semicolon may stand in a string: the first one before which there is an object counts.
    for (auto at = text.find(';'); object.is_discarded() && at != std::string_view::npos;
         at = text.find(';', at + 1)) {
      object = parse_shallow_json(text.substr(0, at));
      end = at + 1;
    }
    if (!read_object(object, found)) return false;
    text.remove_prefix(end);
  }
  calls.insert(calls.end(), found.begin(), found.end());
  return !found.empty();
}

bool ToolCallParser::read_deepseek_call(std::string_view body, std::vector<ToolCall>& calls) const {
  constexpr std::string_view kSeparator = "<｜tool▁sep｜>";
  const auto at = body.find(kSeparator);
  if (at == std::string_view::npos) return false;
  auto name = without_space(body.substr(0, at));
  auto rest = without_space(body.substr(at + kSeparator.size()));
  if (!rest.starts_with('{')) {  // V3: the type stands in front, the name and a block follow
    name = without_space(rest.substr(0, rest.find('\n')));
    const auto begin = rest.find("```json");
    const auto end = rest.rfind("```");  // there may be others in strings
    if (begin == std::string_view::npos || end <= begin) return false;
    rest = without_space(rest.substr(begin + 7, end - begin - 7));
  }
  const auto arguments = parse_shallow_json(rest);
  if (name.empty() || !arguments.is_object()) return false;
  calls.push_back({std::string(name), as_text(arguments)});
  return true;
}

bool ToolCallParser::read_function_tag(std::string_view body, std::vector<ToolCall>& calls) const {
  const auto name = take_between(body, "<function=", ">");
  if (!name) return false;
  ToolCall call{.name = std::string(without_space(*name))};
  auto arguments = ordered_json::object();
  while (const auto key = take_between(body, "<parameter=", ">")) {
    const auto end = body.find("</parameter>");
    if (end == std::string_view::npos) return false;
    auto value = body.substr(0, end);
    body.remove_prefix(end);
    if (value.starts_with('\n')) value.remove_prefix(1);
    if (value.ends_with('\n')) value.remove_suffix(1);
    arguments[std::string(*key)] = argument(call.name, std::string(*key), std::string(value));
  }
  call.arguments = as_text(arguments);
  calls.push_back(std::move(call));
  return true;
}

bool ToolCallParser::read_arg_keys(std::string_view body, std::vector<ToolCall>& calls) const {
  ToolCall call{.name = std::string(without_space(body.substr(0, body.find("<arg_key>"))))};
  if (call.name.empty() || call.name.find_first_of("<>\n{}") != std::string::npos) return false;
  auto arguments = ordered_json::object();
  while (const auto key = take_between(body, "<arg_key>", "</arg_key>")) {
    const auto value = take_between(body, "<arg_value>", "</arg_value>");
    if (!value) return false;
    const std::string name(without_space(*key));
    arguments[name] = argument(call.name, name, std::string(*value));
  }
  call.arguments = as_text(arguments);
  calls.push_back(std::move(call));
  return true;
}

// A value that a format writes without quotes: text if the schema says so, else JSON if it is some.
ordered_json ToolCallParser::argument(const std::string& tool,
                                      const std::string& key,
                                      std::string value) const {
  if (tools_.is_array()) {
    for (const auto& one : tools_) {
      const auto function =
          one.is_object() ? one.value("function", ordered_json()) : ordered_json();
      if (!function.is_object() || function.value("name", ordered_json()) != tool) continue;
      const ordered_json::json_pointer path("/parameters/properties");
      if (!function.contains(path) || !function[path].is_object()) break;
      const auto schema = function[path].value(key, ordered_json());
      if (schema.is_object() && schema.value("type", ordered_json()) == "string") return value;
    }
  }
  auto parsed = parse_shallow_json(value);
  return parsed.is_discarded() ? ordered_json(std::move(value)) : parsed;
}

}  // namespace ferry::rollout::text
