#include "rollout/grammar/schema_parts.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <set>
#include <utility>

#include "distckpt/base/encodings.h"
#include "distckpt/base/error.h"

namespace ferry::rollout::grammar {
namespace {

constexpr int kDeepestReferences = 50;
constexpr std::size_t kMostValues = 4'000'000;  // copied, about a second
// The cost of comparing two schemas, and of merging them, in values that are copied.
constexpr std::size_t kValuesOfAPair = 20;
constexpr std::size_t kValuesOfAMerge = 50;

constexpr std::array kKeywords{"type",          "enum",
                               "const",         "anyOf",
                               "oneOf",         "allOf",
                               "$ref",          "properties",
                               "required",      "additionalProperties",
                               "minProperties", "maxProperties",
                               "propertyNames", "patternProperties",
                               "items",         "prefixItems",
                               "minItems",      "maxItems",
                               "uniqueItems",   "minLength",
                               "maxLength",     "pattern",
                               "format",        "minimum",
                               "maximum",       "exclusiveMinimum",
                               "multipleOf",    "exclusiveMaximum"};
constexpr std::array kAnnotations{"$schema",         "$id",
                                  "$comment",        "$defs",
                                  "definitions",     "title",
                                  "description",     "default",
                                  "examples",        "example",
                                  "deprecated",      "readOnly",
                                  "writeOnly",       "contentMediaType",
                                  "contentEncoding", "discriminator"};

bool is_minimum(std::string_view keyword) {
  return keyword.starts_with("min") || keyword == "exclusiveMinimum";
}
bool is_maximum(std::string_view keyword) {
  return keyword.starts_with("max") || keyword == "exclusiveMaximum";
}

ordered_json list_of(const ordered_json& value) {
  return value.is_array() ? value : ordered_json::array({value});
}

bool has(const ordered_json& list, const ordered_json& value) {
  return std::ranges::find(list, value) != list.end();
}

ordered_json common(const ordered_json& one, const ordered_json& other) {
  const auto mine = list_of(one), others = list_of(other);
  const std::set<ordered_json> known(others.begin(), others.end());
  auto both = ordered_json::array();
  for (const auto& value : mine)
    if (known.contains(value)) both.push_back(value);
  return both;
}

// Types of both. An integer is a number, too.
ordered_json common_types(const ordered_json& one, const ordered_json& other) {
  const auto takes = [](const ordered_json& types, const ordered_json& type) {
    return has(types, type) || (type == "integer" && has(types, "number"));
  };
  const auto mine = list_of(one), others = list_of(other);
  auto both = ordered_json::array();
  for (const auto& types : {mine, others})
    for (const auto& type : types)
      if (takes(mine, type) && takes(others, type) && !has(both, type)) both.push_back(type);
  return both;
}

ordered_json both_of(const ordered_json& one, const ordered_json& other) {
  return {{"allOf", ordered_json::array({one, other})}};
}

// Objects that list their members alone are as if they refused others (json_schema.h).
bool allows_others(const ordered_json& schema) {
  return !schema.contains("additionalProperties") || schema["additionalProperties"] == true;
}

bool has_pattern_beside(const ordered_json& schema, const ordered_json& other) {
  return schema.contains("patternProperties") &&
         std::ranges::any_of(std::array{"patternProperties", "properties", "additionalProperties",
                                        "propertyNames", "required"},
                             [&](const char* key) { return other.contains(key); });
}

void merge_keyword(ordered_json& into,
                   const std::string& key,
                   const ordered_json& value,
                   const std::string& at) {
  auto& mine = into[key];
  if (mine == value || is_annotation(key)) return;
  if (key == "required") {
    for (const auto& name : value)
      if (!has(mine, name)) mine.push_back(name);
  } else if (key == "type") {
    mine = common_types(mine, value);
  } else if (key == "enum") {
    mine = common(mine, value);
  } else if (key == "properties" && mine.is_object() && value.is_object()) {
    for (const auto& [name, schema] : value.items())
      mine[name] =
          mine.contains(name) && mine[name] != schema ? both_of(mine[name], schema) : schema;
  } else if ((is_minimum(key) || is_maximum(key)) && mine.is_number() && value.is_number()) {
    if (is_minimum(key) ? mine < value : value < mine) mine = value;
  } else if (key == "items" && !mine.is_array() && !value.is_array()) {
    mine = both_of(mine, value);
  } else if (key == "additionalProperties" && (mine == true || value == true)) {
    if (mine == true) mine = value;
  } else if (key == "uniqueItems" && mine.is_boolean() && value.is_boolean()) {
    mine = mine.get<bool>() || value.get<bool>();
  } else if (key == "propertyNames") {
    mine = both_of(mine, value);
  } else {
    refuse_schema(key, at, "is in two schemas that hold together: that is not supported");
  }
}

ordered_json with_references(Document& document,
                             const ordered_json& whole,
                             const std::string& at,
                             int depth) {
  if (depth > kDeepestReferences) refuse_schema("$ref", at, "leads to itself");
  document.charge(whole, at);
  auto schema = whole;
  if (!schema.is_object()) return schema;
  if (schema.contains("$ref")) {
    if (!schema["$ref"].is_string()) refuse_schema("$ref", at, "is no text");
    const auto& target = resolve(document.root(), schema["$ref"].get<std::string>(), at);
    schema.erase("$ref");
    return merge(document, target, schema, at, depth + 1);
  }
  if (!schema.contains("allOf")) return schema;
  if (!schema["allOf"].is_array()) refuse_schema("allOf", at, "is no list of something");
  const auto all = std::move(schema["allOf"]);
  schema.erase("allOf");
  for (const auto& one : all) schema = merge(document, schema, one, at, depth + 1);
  return schema;
}

// The same without a copy, where the schema has no references; else it is held by `copy`.
const ordered_json& resolved(Document& document, const ordered_json& schema, ordered_json& copy) {
  const bool refers = schema.is_object() && (schema.contains("$ref") || schema.contains("allOf"));
  if (!refers) return schema;
  return copy = with_references(document, schema, "", 0);
}

// A long text counts as several.
std::size_t num_values(const ordered_json& schema) {
  constexpr std::size_t kBytesOfAValue = 16;
  std::size_t count = 1;
  if (schema.is_string()) count += schema.get_ref<const std::string&>().size() / kBytesOfAValue;
  if (schema.is_array())
    for (const auto& part : schema) count += num_values(part);
  if (schema.is_object())
    for (const auto& [key, part] : schema.items())
      count += key.size() / kBytesOfAValue + num_values(part);
  return count;
}

ordered_json types_of(const ordered_json& schema) {
  if (schema.contains("type")) return list_of(schema["type"]);
  if (schema.contains("properties") || schema.contains("required"))
    return ordered_json::array({"object"});
  return nullptr;
}

ordered_json values_of(const ordered_json& schema) {
  if (schema.contains("const")) return ordered_json::array({schema["const"]});
  return schema.value("enum", ordered_json());
}

}  // namespace

void Document::charge(const ordered_json& schema, const std::string& at) {
  charge(num_values(schema), at);
}

void Document::charge(std::size_t num_values, const std::string& at) {
  num_values_ += num_values;
  if (num_values_ > kMostValues)
    refuse_schema("a part", at, "makes the schema too large: too much of it is copied or compared");
}

void refuse_schema(std::string_view keyword, const std::string& at, std::string_view why) {
  throw Error(ErrorKind::kUsage, fmt::format("{} at #{} {}", keyword, at, why));
}

bool is_annotation(std::string_view keyword) {
  return keyword.starts_with("x-") ||
         std::ranges::find(kAnnotations, keyword) != kAnnotations.end();
}

void check_keywords(const ordered_json& schema, const std::string& at) {
  for (const auto& [key, value] : schema.items()) {
    const auto is_it = [&](std::string_view known) { return known == key; };
    if (!is_annotation(key) && std::ranges::none_of(kKeywords, is_it)) refuse_schema(key, at);
  }
}

const ordered_json& resolve(const ordered_json& root,
                            const std::string& ref,
                            const std::string& at) {
  if (!ref.starts_with('#')) refuse_schema("$ref", at, fmt::format("to {} is not supported", ref));
  try {
    // A reference is a URI: behind # any byte may be two digits (RFC 6901, 6).
    return root.at(ordered_json::json_pointer(percent_decoded(std::string_view(ref).substr(1))));
  } catch (const ordered_json::exception&) {
    refuse_schema("$ref", at, fmt::format("names {}, which is not there", ref));
  }
}

ordered_json merge(Document& document,
                   const ordered_json& one,
                   const ordered_json& other,
                   const std::string& at,
                   int depth) {
  if (one == false || other == false) return false;
  if (one == true || (one.is_object() && one.empty())) {
    document.charge(other, at);
    return other;
  }
  if (other == true || (other.is_object() && other.empty())) {
    document.charge(one, at);
    return one;
  }
  if (!one.is_object() || !other.is_object())
    refuse_schema("allOf", at, "has a part that is no schema");
  document.charge(kValuesOfAMerge, at);
  auto merged = with_references(document, one, at, depth);
  const auto more = with_references(document, other, at, depth);
  if (!merged.is_object() || !more.is_object()) return merge(document, merged, more, at, depth + 1);
  const auto names_within = [](const ordered_json& names, const ordered_json& all) {
    const auto mine = names.value("properties", ordered_json::object());
    const auto others = all.value("properties", ordered_json::object());
    for (const auto& [name, schema] : mine.items())
      if (!others.contains(name)) return false;
    return true;
  };
  if ((!allows_others(merged) && !names_within(more, merged)) ||
      (!allows_others(more) && !names_within(merged, more)))
    refuse_schema("additionalProperties", at,
                  "is in one of two schemas that hold together, and the other has more properties: "
                  "that is not supported");
  if (has_pattern_beside(merged, more) || has_pattern_beside(more, merged))
    refuse_schema("patternProperties", at,
                  "is in one of two schemas that hold together, and the other has properties: that "
                  "is not supported");
  for (const auto& [key, value] : more.items()) {
    if (merged.contains(key))
      merge_keyword(merged, key, value, at);
    else
      merged[key] = value;
  }
  return merged;
}

ordered_json united(const ordered_json& root) {
  Document document(root);
  auto schema = root;
  for (int depth = 0; schema.is_object() && (schema.contains("$ref") || schema.contains("allOf"));
       ++depth)
    schema = with_references(document, schema, "", depth);
  for (const char* key : {"$defs", "definitions"})
    if (schema.is_object() && root.contains(key)) schema[key] = root[key];
  return schema;
}

bool are_disjoint(Document& document, const ordered_json& one, const ordered_json& other) {
  ordered_json copy, other_copy;
  const auto& a = resolved(document, one, copy);
  const auto& b = resolved(document, other, other_copy);
  document.charge(kValuesOfAPair, "");
  document.charge(a, "");
  document.charge(b, "");
  if (a == false || b == false) return true;
  if (!a.is_object() || !b.is_object()) return false;
  const auto values = values_of(a), others = values_of(b);
  if (values.is_array() && others.is_array()) return common(values, others).empty();
  const auto types = types_of(a), other_types = types_of(b);
  if (types.is_array() && other_types.is_array()) {
    const auto both = common_types(types, other_types);
    if (both.empty()) return true;
    if (both != ordered_json::array({"object"})) return false;
  }
  for (const auto& name : common(a.value("required", ordered_json::array()),
                                 b.value("required", ordered_json::array()))) {
    const auto key = name.is_string() ? name.get<std::string>() : "";
    const auto of = [&](const ordered_json& schema) {
      const auto all = schema.value("properties", ordered_json::object());
      return all.is_object() ? all.value(key, ordered_json(true)) : ordered_json(true);
    };
    if (are_disjoint(document, of(a), of(b))) return true;
  }
  return false;
}

const StringFormat* string_format(std::string_view format) {
#define FERRY_DATE                                                                                \
  "[1-9]\\d{3}-((0[13578]|1[02])-(0[1-9]|[12]\\d|3[01])|(0[469]|11)-(0[1-9]|[12]\\d|30)|02-(0[1-" \
  "9]|1\\d|2[0-8]))"
#define FERRY_TIME \
  "([01]\\d|2[0-3]):[0-5]\\d:[0-5]\\d(\\.\\d{1,6})?(Z|[+-]([01]\\d|2[0-3]):[0-5]\\d)"
  static constexpr std::pair<std::string_view, StringFormat> kFormats[] = {
      {"date", {"^" FERRY_DATE "$", 10, 10}},
      {"time", {"^" FERRY_TIME "$", 9, 21}},
      {"date-time", {"^" FERRY_DATE "T" FERRY_TIME "$", 20, 32}},
      {"duration", {"^P(\\d{1,4}D(T\\d{1,4}S)?|\\d{1,4}W|T\\d{1,4}[HMS])$", 3, 12}},
      {"uuid", {"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$", 36, 36}},
      {"ipv4",
       {"^((25[0-5]|2[0-4]\\d|1\\d\\d|[1-9]?\\d)\\.){3}(25[0-5]|2[0-4]\\d|1\\d\\d|[1-9]?\\d)$", 7,
        15}},
      {"ipv6", {"^([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}$", 15, 39}},
      {"hostname",
       {"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?(\\.[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?){0,5}$", 1,
        197}},
      // At most 64 characters before @, and 254 in all (RFC 5321, 4.5.3.1).
      {"email",
       {"^([a-zA-Z0-9_+-]{1,64}|[a-zA-Z0-9_+-]{1,20}(\\.[a-zA-Z0-9_+-]{1,20}){1,2})@[a-z0-9]([a-z0-"
        "9-]{0,30}[a-z0-9])?(\\.[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?){0,3}\\.[a-z]{2,24}$",
        6, 221}},
      {"uri",
       {"^https?://[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?(\\.[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?){0,5}"
        "(:[1-9]\\d{0,3})?(/[A-Za-z0-9._~-]{0,64}){0,8}$",
        8, 730}}};
#undef FERRY_DATE
#undef FERRY_TIME
  for (const auto& [name, known] : kFormats)
    if (name == format) return &known;
  return nullptr;
}

bool is_asserted(std::string_view format) {
  constexpr std::array kOthers{"idn-email",     "idn-hostname",          "iri",
                               "iri-reference", "uri-reference",         "uri-template",
                               "json-pointer",  "relative-json-pointer", "regex"};
  return string_format(format) != nullptr || std::ranges::find(kOthers, format) != kOthers.end();
}

}  // namespace ferry::rollout::grammar
