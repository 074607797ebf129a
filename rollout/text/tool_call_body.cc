#include "rollout/text/tool_call_body.h"

#include <algorithm>
#include <utility>

#include "distckpt/base/trimmed.h"
#include "rollout/text/literals.h"
#include "rollout/text/shallow_json.h"

namespace ferry::rollout::text {
namespace {

using nlohmann::ordered_json;

// {"name": ..., "arguments" or "parameters": {...}}
bool read_object(const ordered_json& object, std::vector<ToolCall>& calls) {
  if (!object.is_object() || !object.contains("name") || !object["name"].is_string()) return false;
  for (const char* key : {"arguments", "parameters"}) {
    if (!object.contains(key)) continue;
    auto arguments = object[key];
    if (arguments.is_string()) arguments = parse_exact_json(arguments.get<std::string>());
    if (!arguments.is_object()) return false;
    calls.push_back({object["name"].get<std::string>(), json_text(arguments)});
    return true;
  }
  return false;
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

bool skip_prefix(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return false;
  text.remove_prefix(prefix.size());
  return true;
}

// The value of an attribute in ` name="f" string="true"`, with or without quotes.
std::optional<std::string_view> attribute(std::string_view tag, std::string_view name) {
  for (auto at = tag.find(name); at != std::string_view::npos; at = tag.find(name, at + 1)) {
    auto value = tag.substr(at + name.size());
    if ((at > 0 && tag[at - 1] != ' ') || !skip_prefix(value, "=")) continue;
    const auto quote = value.substr(0, 1);
    if (quote == "\"" || quote == "'")
      return value.find(quote, 1) == std::string_view::npos
                 ? std::nullopt
                 : std::optional(value.substr(1, value.find(quote, 1) - 1));
    return value.substr(0, value.find(' '));
  }
  return std::nullopt;
}

// A line break that a model writes around a value is none of it.
std::string_view without_line_breaks(std::string_view value) {
  if (value.starts_with('\n')) value.remove_prefix(1);
  if (value.ends_with('\n')) value.remove_suffix(1);
  return value;
}

bool read_deepseek_call(std::string_view body, std::vector<ToolCall>& calls) {
  constexpr std::string_view kSeparator = "<｜tool▁sep｜>";
  const auto at = body.find(kSeparator);
  if (at == std::string_view::npos) return false;
  auto name = trimmed(body.substr(0, at));
  auto rest = trimmed(body.substr(at + kSeparator.size()));
  if (!rest.starts_with('{')) {  // V3: the type stands in front, the name and a block follow
    name = trimmed(rest.substr(0, rest.find('\n')));
    const auto begin = rest.find("```json");
    const auto end = rest.rfind("```");  // there may be others in strings
    if (begin == std::string_view::npos || end <= begin) return false;
    rest = trimmed(rest.substr(begin + 7, end - begin - 7));
  }
  auto arguments = object_text(rest);
  if (name.empty() || !arguments) return false;
  calls.push_back({std::string(name), std::move(*arguments)});
  return true;
}

// functions.name:index, which is the call's id, and JSON.
bool read_kimi_call(std::string_view body, std::vector<ToolCall>& calls) {
  constexpr std::string_view kSeparator = "<|tool_call_argument_begin|>";
  const auto at = body.find(kSeparator);
  if (at == std::string_view::npos) return false;
  const auto id = trimmed(body.substr(0, at));
  auto arguments = object_text(body.substr(at + kSeparator.size()));
  auto name = id.substr(0, id.rfind(':'));
  skip_prefix(name, "functions.");
  if (name.empty() || !arguments) return false;
  calls.push_back({std::string(name), std::move(*arguments), std::string(id)});
  return true;
}

// A list of objects, each a call.
bool read_objects(std::string_view body, std::vector<ToolCall>& calls) {
  const auto list = parse_exact_json(body);
  std::vector<ToolCall> found;
  if (!list.is_array() || list.empty() ||
      !std::ranges::all_of(list, [&](const auto& one) { return read_object(one, found); }))
    return false;
  calls.insert(calls.end(), found.begin(), found.end());
  return true;
}

// The list that older models write, or name[CALL_ID]id[ARGS]{...}, whose id clients do not see.
bool read_mistral_calls(std::string_view body, std::vector<ToolCall>& calls) {
  if (body.starts_with('[')) return read_objects(body, calls);
  const auto name = trimmed(body.substr(0, body.find_first_of("[{")));
  auto arguments = object_text(body.substr(std::min(body.find('{'), body.size())));
  if (name.empty() || !arguments) return false;
  calls.push_back({std::string(name), std::move(*arguments)});
  return true;
}

bool read_python_calls(std::string_view body, std::vector<ToolCall>& calls) {
  const auto found = parse_python_calls(body);
  if (!found) return false;
  for (const auto& [name, arguments] : *found) calls.push_back({name, json_text(arguments)});
  return true;
}

// call:name{...}
bool read_gemma_call(std::string_view body, std::string_view quote, std::vector<ToolCall>& calls) {
  if (!skip_prefix(body, "call:")) return false;
  const auto size = std::min(body.find('{'), body.size());
  const auto name = trimmed(body.substr(0, size));
  const auto arguments = parse_gemma_object(body.substr(size), quote);
  if (name.empty() || arguments.is_discarded()) return false;
  calls.push_back({std::string(name), json_text(arguments)});
  return true;
}

bool is_integer(const ordered_json& value) {
  return value.is_number_integer() || is_wide_integer(value);
}

std::string type_of(const ordered_json& value) {
  if (is_integer(value)) return "integer";
  return value.is_number() ? "number" : value.type_name();
}

void gather_types(const ordered_json& schema, std::set<std::string>& types) {
  if (!schema.is_object()) return;
  const auto type = schema.value("type", ordered_json());
  if (type.is_string()) types.insert(type.get<std::string>());
  if (type.is_array())
    for (const auto& one : type)
      if (one.is_string()) types.insert(one.get<std::string>());
  if (schema.contains("const")) types.insert(type_of(schema["const"]));
  const auto constants = schema.value("enum", ordered_json());
  if (constants.is_array())
    for (const auto& one : constants) types.insert(type_of(one));
  for (const char* key : {"anyOf", "oneOf", "allOf"}) {
    const auto ways = schema.value(key, ordered_json());
    if (ways.is_array())
      for (const auto& one : ways) gather_types(one, types);
  }
}

// A value that stands without quotes, as the first of the types, in vLLM's order, that it can have.
std::optional<ordered_json> as_one_of(const std::set<std::string>& types,
                                      std::string_view value,
                                      const ordered_json& parsed) {
  std::string word(trimmed(value));
  std::ranges::transform(word, word.begin(),
                         [](char c) { return c >= 'A' && c <= 'Z' ? c + ('a' - 'A') : c; });
  const auto is_one_of = [&](std::initializer_list<std::string_view> words) {
    return std::ranges::find(words, word) != words.end();
  };
  const bool may_be_string = types.contains("string");
  if ((types.contains("null") || !may_be_string) && is_one_of({"null", "none", "nil"}))
    return nullptr;
  if (types.contains("integer") && is_integer(parsed)) return parsed;
  if (types.contains("number") && (parsed.is_number() || is_integer(parsed))) return parsed;
  if (types.contains("boolean") && is_one_of({"true", "1", "yes", "on"})) return true;
  if (types.contains("boolean") && is_one_of({"false", "0", "no", "off"})) return false;
  if (types.contains("object") && parsed.is_object()) return parsed;
  if (types.contains("array") && parsed.is_array()) return parsed;
  if (may_be_string && (is_text(types) || !parsed.is_string()))
    return ordered_json(std::string(value));
  return std::nullopt;
}

}  // namespace

std::size_t beginning_at_end(std::string_view text, std::string_view marker) {
  for (auto size = std::min(text.size(), marker.size() - 1); size > 0; --size)
    if (text.ends_with(marker.substr(0, size))) return size;
  return 0;
}

std::set<std::string> types_of(const ordered_json& schema) {
  std::set<std::string> types;
  gather_types(schema, types);
  return types;
}

bool is_text(const std::set<std::string>& types) {
  return types.contains("string") && types.size() == (types.contains("null") ? 2U : 1U);
}

std::optional<std::string> object_text(std::string_view text) {
  const auto object = parse_exact_json(trimmed(text));
  return object.is_object() ? std::optional(json_text(object)) : std::nullopt;
}

bool ToolCallBody::read(std::string_view body, Calls& calls) const {
  body = trimmed(body);
  switch (format_) {
    case ToolFormat::kDeepSeekV3:
    case ToolFormat::kDeepSeekV31:
      return read_deepseek_call(body, calls);
    case ToolFormat::kDeepSeekV32:
    case ToolFormat::kDeepSeekV4:
      return read_invokes(body, "｜DSML｜", calls);
    case ToolFormat::kKimiK2:
      return read_kimi_call(body, calls);
    case ToolFormat::kMiniMaxM2:
      return read_invokes(body, "", calls);
    case ToolFormat::kSeedOss:
      return read_function_tags(body, calls);
    case ToolFormat::kGranite:
    case ToolFormat::kPhi4Mini:
    case ToolFormat::kHunyuan:
      return read_objects(body, calls);
    case ToolFormat::kMistral:
      return read_mistral_calls(body, calls);
    case ToolFormat::kOlmo3:
      return read_python_calls(body, calls);
    case ToolFormat::kPythonic:
      return body.starts_with('[') && body.ends_with(']') &&
             read_python_calls(body.substr(1, body.size() - 2), calls);
    case ToolFormat::kGemma4:
      return read_gemma_call(body, "<|\"|>", calls);
    case ToolFormat::kFunctionGemma:
      return read_gemma_call(body, "<escape>", calls);
    case ToolFormat::kHermes:
    case ToolFormat::kQwen3Coder:
    case ToolFormat::kGlm45:
    case ToolFormat::kLlama3Json:
    case ToolFormat::kOpenAi:
      break;
  }
  if (body.starts_with("<function=")) return read_function_tag(body, calls);
  if (!body.starts_with('{')) return read_arg_keys(body, calls);
  return read_object(parse_exact_json(body), calls);
}

bool ToolCallBody::read_last(std::string_view body, Calls& calls) const {
  body = trimmed(body);
  const bool is_json = body.starts_with('{');
  switch (format_) {
    case ToolFormat::kHermes:
    case ToolFormat::kQwen3Coder:
    case ToolFormat::kGlm45:
      return (is_json || body.ends_with("</function>")) && read(body, calls);
    default:
      return read(body, calls);
  }
}

bool ToolCallBody::read_function_tag(std::string_view body, Calls& calls) const {
  const auto name = take_between(body, "<function=", ">");
  if (!name) return false;
  ToolCall call{.name = std::string(trimmed(*name))};
  auto arguments = ordered_json::object();
  while (const auto key = take_between(body, "<parameter=", ">")) {
    // The end of a value may be missing where another begins, or behind the last one.
    auto end = body.find("</parameter>");
    end = std::min(end, body.find("<parameter="));
    if (end == std::string_view::npos) end = body.find("</function>");
    if (end == std::string_view::npos) return false;
    const auto value = without_line_breaks(body.substr(0, end));
    body.remove_prefix(end);
    arguments[std::string(*key)] = argument(call.name, std::string(*key), value);
  }
  call.arguments = json_text(arguments);
  calls.push_back(std::move(call));
  return true;
}

// <function=...>...</function>, one or several.
bool ToolCallBody::read_function_tags(std::string_view body, Calls& calls) const {
  constexpr std::string_view kEnd = "</function>";
  Calls found;
  while (!body.empty()) {
    const auto end = body.find(kEnd);
    if (!body.starts_with("<function=") || end == std::string_view::npos ||
        !read_function_tag(body.substr(0, end), found))
      return false;
    body = trimmed(body.substr(end + kEnd.size()));
  }
  calls.insert(calls.end(), found.begin(), found.end());
  return !found.empty();
}

bool ToolCallBody::read_arg_keys(std::string_view body, Calls& calls) const {
  const auto first = body.find("<arg_key>");
  ToolCall call{.name = std::string(trimmed(body.substr(0, first)))};
  if (call.name.empty() || call.name.find_first_of("<>\n{}") != std::string::npos) return false;
  if (first == std::string_view::npos && function_of(call.name) == nullptr) return false;
  auto arguments = ordered_json::object();
  while (const auto key = take_between(body, "<arg_key>", "</arg_key>")) {
    const auto value = take_between(body, "<arg_value>", "</arg_value>");
    if (!value) return false;
    const std::string name(trimmed(*key));
    arguments[name] = argument(call.name, name, *value);
  }
  call.arguments = json_text(arguments);
  calls.push_back(std::move(call));
  return true;
}

// <invoke name="...">...</invoke>, one or several, with `mark` in front of the names of tags.
bool ToolCallBody::read_invokes(std::string_view body, std::string_view mark, Calls& calls) const {
  Calls found;
  for (; !body.empty(); body = trimmed(body))
    if (!read_invoke(body, mark, found.emplace_back())) return false;
  calls.insert(calls.end(), found.begin(), found.end());
  return !found.empty();
}

bool ToolCallBody::read_invoke(std::string_view& body,
                               std::string_view mark,
                               ToolCall& call) const {
  const auto tag = [&](std::string_view slash, std::string_view name, std::string_view end) {
    return std::string("<").append(slash).append(mark).append(name).append(end);
  };
  // The attributes of a tag that begins here.
  const auto open = [&](std::string_view name) -> std::optional<std::string_view> {
    const auto begin = tag("", name, " ");
    return body.starts_with(begin) ? take_between(body, begin, ">") : std::nullopt;
  };
  const auto attributes = open("invoke");
  const auto name = attributes ? attribute(*attributes, "name") : std::nullopt;
  if (!name || name->empty()) return false;
  call.name = *name;
  auto arguments = ordered_json::object();
  while (!skip_prefix(body = trimmed(body), tag("/", "invoke", ">"))) {
    const auto of_parameter = open("parameter");
    const auto key = of_parameter ? attribute(*of_parameter, "name") : std::nullopt;
    const auto value = key ? take_between(body, "", tag("/", "parameter", ">")) : std::nullopt;
    if (!value) return false;
    const auto is_string = attribute(*of_parameter, "string");
    const auto json = is_string == "false" ? parse_exact_json(*value) : ordered_json();
    arguments[std::string(*key)] = is_string == "true" ? ordered_json(std::string(*value))
                                   : json.is_string()
                                       ? json
                                       : argument(call.name, std::string(*key), *value);
  }
  call.arguments = json_text(arguments);
  return true;
}

// The tool of the request that has the name, or null.
const ordered_json* ToolCallBody::function_of(const std::string& name) const {
  if (!tools_.is_array()) return nullptr;
  for (const auto& one : tools_) {
    const auto function = one.is_object() ? one.find("function") : one.end();
    if (one.is_object() && function != one.end() && function->is_object() &&
        function->value("name", ordered_json()) == name)
      return &*function;
  }
  return nullptr;
}

// A value that a format writes without quotes: by its schema, else JSON if it is some. A value
// without a schema is text where the format says so.
ordered_json ToolCallBody::argument(const std::string& tool,
                                    const std::string& key,
                                    std::string_view value) const {
  ordered_json schema;
  const ordered_json::json_pointer path("/parameters/properties");
  if (const auto* const function = function_of(tool);
      function != nullptr && function->contains(path) && (*function)[path].is_object())
    schema = (*function)[path].value(key, ordered_json());
  const bool breaks_lines = format_ == ToolFormat::kMiniMaxM2;
  const auto text = breaks_lines ? without_line_breaks(value) : value;
  const bool has_text = schema.is_object()
                            ? schema.value("type", ordered_json()) == "string"
                            : format_ == ToolFormat::kMiniMaxM2 || format_ == ToolFormat::kSeedOss;
  if (has_text) return std::string(text);
  auto parsed = parse_exact_json(text);
  const auto types = types_of(schema);
  // Templates of Seed-OSS write lists and objects as Python does.
  if (parsed.is_discarded() && (types.contains("object") || types.contains("array"))) {
    parsed = parse_python_literal(text);
  }
  if (auto typed = as_one_of(types, text, parsed); typed && !types.empty()) return *typed;
  return parsed.is_discarded() ? ordered_json(std::string(text)) : parsed;
}

}  // namespace ferry::rollout::text
