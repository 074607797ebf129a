#include "serve/api/tagged_arguments.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "distckpt/base/error.h"
#include "rollout/grammar/schema_parts.h"
#include "rollout/text/shallow_json.h"
#include "rollout/text/tool_calls.h"

namespace ferry::serve {
namespace {

namespace grammar = rollout::grammar;

[[noreturn]] void refuse(const std::string& keyword, const std::string& at, const char* why = "") {
  throw ApiError(400,
                 fmt::format("tools: {} at #{} {}is not supported in this model's format of calls",
                             keyword, at, why),
                 "tools");
}

ordered_json united(const ordered_json& schema) {
  try {
    return grammar::united(schema);
  } catch (const Error& error) {
    throw ApiError(400, fmt::format("tools: {}", error.what()), "tools");
  }
}

// Refuses what tags with the properties that are listed do not make sure of.
void check_object(const ordered_json& schema) {
  const auto properties =
      schema.is_object() ? schema.value("properties", ordered_json::object()) : ordered_json();
  const auto type =
      schema.is_object() ? schema.value("type", ordered_json("object")) : ordered_json();
  const bool is_object =
      type == "object" || (type.is_array() && std::ranges::find(type, "object") != type.end());
  if (!properties.is_object() || !is_object)
    throw ApiError(400, "tools: parameters: is no schema of an object", "tools");
  const auto required = schema.value("required", ordered_json::array());
  for (const auto& [key, value] : schema.items()) {
    const auto count = value.is_number_unsigned() ? value.get<std::size_t>() : 0;
    const bool is_met = (key == "minProperties" && value.is_number() && count <= required.size()) ||
                        (key == "maxProperties" && count >= properties.size());
    if (!is_met && !grammar::is_annotation(key) && key != "type" && key != "properties" &&
        key != "required" && key != "additionalProperties")
      refuse(key, "");
  }
  for (const auto& name : required)
    if (!name.is_string() || !properties.contains(name.get<std::string>()))
      refuse("required", "",
             fmt::format("names {}, which properties do not: that ", dump(name)).c_str());
}

class ArgumentWriter {
 public:
  ArgumentWriter(const TaggedCall& call, const ordered_json& schema, const ArgumentTags& tags)
      : call_(call),
        schema_(schema),
        tags_(tags),
        tools_({{{"function", {{"name", call.tool}, {"parameters", schema}}}}}) {
    const auto begin = tags.end.find('<');
    marker_ = tags.end.substr(begin, tags.end.find('>') + 1 - begin);
  }

  ordered_json write(const std::string& name) const {
    const auto at = "/properties/" + name;
    const auto& value = schema_["properties"][name];
    const bool is_string =
        value.is_object() && value.value("type", ordered_json()) == ordered_json("string");
    // The reader takes a value of this type as it is, whatever its alternatives are.
    const bool is_bare = is_string || (tags_.between_json.empty() &&
                                       rollout::text::is_text(rollout::text::types_of(value)));
    const auto& between =
        is_bare || tags_.between_json.empty() ? tags_.between : tags_.between_json;
    const auto begin = tags_.begin + name + between;
    ordered_json ways;
    if (is_bare) {
      ways = ordered_json::array();
      add_bare_values(value, begin, name, ways);
      if (ways.empty()) refuse("enum", at);
    } else {
      check_constants(value, at);
    }
    if (!is_read_as(begin + "0", name, nullptr))
      refuse("properties", "", (dump(name) + " as a name ").c_str());
    return sequence_of(
        {text_format(begin),
         is_bare ? list_format("or", std::move(ways))
                 : schema_format(schema_,
                                 (ordered_json::json_pointer("/properties") / name).to_string()),
         text_format(tags_.end)});
  }

 private:
  // The texts of a value that is a string or null.
  void add_bare_values(const ordered_json& value,
                       const std::string& begin,
                       const std::string& name,
                       ordered_json& ways) const {
    const auto at = "/properties/" + name;
    if (!value.is_object()) refuse("anyOf", at);
    const auto alternatives = value.contains("anyOf") ? "anyOf" : "oneOf";
    const bool has_constants = value.contains("enum") || value.contains("const");
    for (const auto& [key, one] : value.items()) {
      const bool is_free_format =
          key == "format" && one.is_string() && !grammar::is_asserted(one.get<std::string>());
      const bool is_known = key == "type" || key == "enum" || key == "const" || key == alternatives;
      const bool is_second = (key == alternatives && (has_constants || value.contains("type"))) ||
                             (key == "enum" && value.contains("const"));
      if ((!is_known && !is_free_format && !grammar::is_annotation(key)) || is_second)
        refuse(key, at);
    }
    if (value.contains(alternatives)) {
      if (!value[alternatives].is_array()) refuse(alternatives, at);
      for (const auto& one : value[alternatives]) add_bare_values(one, begin, name, ways);
      return;
    }
    const auto type = value.value("type", ordered_json());
    const auto has_type = [&](const char* wanted) {
      return type == wanted ||
             (type.is_array() && std::ranges::find(type, ordered_json(wanted)) != type.end());
    };
    auto constants = value.value("enum", ordered_json::array());
    if (value.contains("const")) constants = ordered_json::array({value["const"]});
    for (const auto& one : constants) {
      const auto text = one.is_string() ? one.get<std::string>() : "null";
      if (!type.is_null() && !has_type(one.type_name())) continue;
      if (!is_read_as(begin + text, name, &one)) refuse(dump(one), at, "as a constant ");
      ways.push_back(text_format(text));
    }
    if (has_constants) return;
    if (has_type("string")) ways.push_back({{"type", "any_text"}, {"exclude", marker_}});
    if (has_type("null")) ways.push_back(text_format("null"));
  }

  // Refuses constants inside JSON that hold a marker.
  void check_constants(const ordered_json& schema, const std::string& at, int depth = 0) const {
    if (depth > rollout::text::kDeepestJson || !schema.is_structured()) return;
    for (const auto& [key, value] : schema.items()) {
      const bool is_constant = schema.is_object() && (key == "const" || key == "enum");
      if (is_constant && has_marker(value)) refuse(key, at, "with a marker of a call ");
      check_constants(value, fmt::format("{}/{}", at, key), depth + 1);
    }
  }

  bool has_marker(const ordered_json& value) const {
    if (value.is_structured())
      return std::ranges::any_of(value, [&](const auto& one) { return has_marker(one); });
    if (!value.is_string()) return false;
    const auto& text = value.get_ref<const std::string&>();
    const auto markers = rollout::text::markers_of(call_.format);
    const std::array<std::string_view, 3> all{marker_, markers.end, tags_.begin};
    return std::ranges::any_of(all, [&](auto one) { return text.find(one) != text.npos; });
  }

  // True if the format's own parser finds this argument alone; null: of any value.
  bool is_read_as(const std::string& text,
                  const std::string& name,
                  const ordered_json* value) const {
    rollout::text::ToolCallParser parser(call_.format, tools_);
    auto part = parser.take(call_.begin + text + tags_.end + call_.end);
    auto rest = parser.finish();
    part.calls.insert(part.calls.end(), rest.calls.begin(), rest.calls.end());
    if (part.calls.size() != 1 || part.calls[0].name != call_.tool) return false;
    const auto arguments = rollout::text::parse_exact_json(part.calls[0].arguments);
    return arguments.size() == 1 && arguments.contains(name) &&
           (value == nullptr || arguments[name] == *value);
  }

  const TaggedCall& call_;
  const ordered_json& schema_;
  const ArgumentTags& tags_;
  ordered_json tools_;
  std::string marker_;
};

}  // namespace

ordered_json tagged_arguments(const TaggedCall& call,
                              const ordered_json& given,
                              const ArgumentTags& tags) {
  const auto schema = united(given);
  check_object(schema);
  const auto required = schema.value("required", ordered_json::array());
  const ArgumentWriter writer(call, schema, tags);
  auto parts = ordered_json::array();
  const auto properties = schema.value("properties", ordered_json::object());
  for (const auto& [name, value] : properties.items()) {
    auto one = writer.write(name);
    const bool is_required = std::ranges::find(required, ordered_json(name)) != required.end();
    parts.push_back(is_required ? std::move(one)
                                : ordered_json{{"type", "optional"}, {"content", std::move(one)}});
  }
  return list_format("sequence", std::move(parts));
}

void unite_parameters(ordered_json& tools) {
  const ordered_json::json_pointer path("/function/parameters");
  for (auto& tool : tools) {
    if (!tool.is_object() || !tool.contains(path) || !tool[path].is_object()) continue;
    auto& parameters = tool[path];
    if (!parameters.contains("$ref") && !parameters.contains("allOf")) continue;
    try {
      parameters = grammar::united(parameters);
    } catch (const Error&) {  // a call that has to be made is refused, another one is read without
    }
  }
}

}  // namespace ferry::serve
