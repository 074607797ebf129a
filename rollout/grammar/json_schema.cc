#include "rollout/grammar/json_schema.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <map>
#include <optional>
#include <utility>

#include "distckpt/base/error.h"
#include "rollout/grammar/collection_text.h"
#include "rollout/grammar/json_text.h"
#include "rollout/grammar/number_range.h"
#include "rollout/grammar/regex_expression.h"
#include "rollout/grammar/schema_parts.h"

namespace ferry::rollout::grammar {
namespace {

constexpr std::uint32_t kMostCount = 100'000;  // of minLength and its like
constexpr int kMostSchemas = 20'000;           // compiled, for one that is given
constexpr int kDeepestSchema = 200;
constexpr std::size_t kLongestName = 1000;
constexpr std::size_t kMostUnique = 8;          // there is a rule for each set of them
constexpr std::size_t kMostCounted = 200;       // properties of an object whose number is held
constexpr std::uint64_t kMostRemainders = 500;  // of multipleOf
constexpr std::size_t kMostWholeDigits = 18;    // of a whole number that has no bound
constexpr std::size_t kDigitsOfADouble = 15;

class SchemaReader {
 public:
  SchemaReader(const ordered_json& root, Rules& rules)
      : root_(root), document_(root), json_(rules) {}

  // `at` is a JSON pointer, and a reference a URI, in which a percent sign begins a byte.
  ExpressionPtr read(const std::string& at) {
    std::string uri = "#";
    for (const char c : at) uri += c == '%' ? std::string("%25") : std::string(1, c);
    auto first = refer(uri, "");
    while (!pending_.empty()) {
      const auto [rule, pointer] = pending_.front();
      pending_.pop_front();
      json_.rules().define(rule, of(resolve(root_, "#" + pointer, ""), pointer));
    }
    return first;
  }

 private:
  // The rule of a part of the document, which is read later, so that it can contain itself.
  ExpressionPtr refer(const std::string& ref, const std::string& at) {
    resolve(root_, ref, at);
    const auto pointer = ref.substr(1);
    auto found = rules_.find(pointer);
    if (found == rules_.end()) {
      found = rules_.emplace(pointer, json_.rules().declare()).first;
      pending_.emplace_back(found->second, pointer);
    }
    return Rules::use(found->second);
  }

  ExpressionPtr of(const ordered_json& schema, const std::string& at) {
    if (++num_schemas_ > kMostSchemas || depth_ > kDeepestSchema)
      refuse_schema("$ref", at, "makes the schema too large");
    ++depth_;
    auto expression = of_checked(schema, at);
    --depth_;
    return expression;
  }

  ExpressionPtr of_checked(const ordered_json& schema, const std::string& at) {
    if (schema.is_boolean()) return schema.get<bool>() ? json_.value() : never();
    if (!schema.is_object()) refuse_schema("schema", at, "is neither an object nor true or false");
    check_keywords(schema, at);
    document_.charge(schema, at);
    auto rest = schema;
    for (const auto& [key, value] : schema.items())
      if (is_annotation(key)) rest.erase(key);
    if (rest.contains("$ref")) {
      if (!rest["$ref"].is_string()) refuse_schema("$ref", at, "is no text");
      if (rest.size() == 1) return refer(rest["$ref"].get<std::string>(), at);
      return of(merged(rest, at), at);
    }
    if (rest.contains("allOf")) return all_of(rest, at);
    for (const char* key : {"anyOf", "oneOf"})
      if (rest.contains(key)) return any_of(rest, key, at);
    if (rest.contains("const") || rest.contains("enum")) return constants(rest, at);
    return typed(rest, at);
  }

  ordered_json merged(ordered_json schema, const std::string& at) {
    const auto& target = resolve(root_, schema["$ref"].get<std::string>(), at);
    schema.erase("$ref");
    return merge(document_, target, schema, at);
  }

  ExpressionPtr all_of(ordered_json rest, const std::string& at) {
    const auto all = list(rest, "allOf", at);
    if (rest.size() == 1 && all.size() == 1) return of(all[0], at + "/allOf/0");
    rest.erase("allOf");
    for (const auto& one : all) rest = merge(document_, rest, one, at);
    return of(rest, at);
  }

  ExpressionPtr any_of(ordered_json rest, const char* key, const std::string& at) {
    const auto all = list(rest, key, at);
    rest.erase(key);
    std::vector<ExpressionPtr> ways;
    for (std::size_t i = 0; i < all.size(); ++i) {
      const auto place = fmt::format("{}/{}/{}", at, key, i);
      ways.push_back(of(rest.empty() ? all[i] : merge(document_, rest, all[i], place), place));
      for (std::size_t j = 0; key == std::string_view("oneOf") && j < i; ++j)
        if (!are_disjoint(document_, all[j], all[i]))
          refuse_schema(
              key, at,
              fmt::format(
                  "is not supported where a value may be valid by two of its schemas, as {} and {}",
                  j, i));
    }
    return choice(std::move(ways));
  }

  // Each value that the type allows, in one spelling.
  ExpressionPtr constants(const ordered_json& rest, const std::string& at) {
    std::vector<ExpressionPtr> ways;
    for (const auto& value : constants_of(rest, at)) ways.push_back(literal(value.dump()));
    return choice(std::move(ways));
  }

  static std::vector<ordered_json> constants_of(const ordered_json& rest, const std::string& at) {
    for (const auto& [key, value] : rest.items())
      if (key != "const" && key != "enum" && key != "type" && !is_annotation(key))
        refuse_schema(key, at, "beside enum or const is not supported");
    std::vector<ordered_json> values;
    const char* const key = rest.contains("const") ? "const" : "enum";
    for (const auto& value :
         rest.contains("const") ? ordered_json::array({rest["const"]}) : list(rest, "enum", at)) {
      if (has_inexact_number(value)) refuse_schema(key, at, "has a number beyond 64 bits");
      const bool is_listed = key == std::string_view("enum") || !rest.contains("enum") ||
                             std::ranges::find(rest["enum"], value) != rest["enum"].end();
      if (is_listed && (!rest.contains("type") || is_of_type(value, rest["type"])))
        values.push_back(value);
    }
    return values;
  }

  // A number beyond 64 bits may have been rounded when the schema was read.
  static bool has_inexact_number(const ordered_json& value) {
    if (value.is_structured())
      return std::ranges::any_of(value, [](const auto& one) { return has_inexact_number(one); });
    return value.is_number_float() && std::abs(value.get<double>()) >= 0x1p63;
  }

  static bool is_of_type(const ordered_json& value, const ordered_json& type) {
    if (type.is_array())
      return std::ranges::any_of(type, [&](const auto& one) { return is_of_type(value, one); });
    const bool is_whole =
        value.is_number_integer() ||
        (value.is_number() && value.get<double>() == std::floor(value.get<double>()));
    return (type == "null" && value.is_null()) || (type == "boolean" && value.is_boolean()) ||
           (type == "integer" && is_whole) || (type == "number" && value.is_number()) ||
           (type == "string" && value.is_string()) || (type == "array" && value.is_array()) ||
           (type == "object" && value.is_object());
  }

  ExpressionPtr typed(const ordered_json& rest, const std::string& at) {
    const auto given = rest.find("type");
    const auto has_one = [&](std::initializer_list<const char*> keys) {
      return std::ranges::any_of(keys, [&](const char* key) { return rest.contains(key); });
    };
    auto types = ordered_json::array();
    if (given != rest.end()) {
      types = given->is_array() ? *given : ordered_json::array({*given});
    } else {
      if (has_one({"properties", "required", "additionalProperties", "patternProperties",
                   "propertyNames", "minProperties", "maxProperties"}))
        types.push_back("object");
      if (has_one({"items", "prefixItems", "minItems", "maxItems", "uniqueItems"}))
        types.push_back("array");
      if (has_one({"minLength", "maxLength", "pattern", "format"})) types.push_back("string");
      if (has_one({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}))
        types.push_back("number");
      if (types.empty()) return json_.value();
    }
    std::vector<ExpressionPtr> ways;
    for (const auto& type : types) ways.push_back(of_type(type, rest, at));
    return choice(std::move(ways));
  }

  ExpressionPtr of_type(const ordered_json& type, const ordered_json& rest, const std::string& at) {
    if (type == "null") return literal("null");
    if (type == "boolean") return choice({literal("true"), literal("false")});
    if (type == "string") return string(rest, at);
    if (type == "integer") return integer(rest, at);
    if (type == "number") return number(rest, at);
    if (type == "array") return array(rest, at);
    if (type == "object") return object(rest, at);
    refuse_schema("type", at, fmt::format("is {}: that is none", type.dump()));
  }

  static const ordered_json& list(const ordered_json& schema,
                                  const char* key,
                                  const std::string& at) {
    if (!schema[key].is_array() || schema[key].empty())
      refuse_schema(key, at, "is no list of something");
    return schema[key];
  }

  static std::optional<std::uint32_t> count(const ordered_json& schema,
                                            const char* key,
                                            const std::string& at) {
    if (!schema.contains(key)) return std::nullopt;
    const auto& value = schema[key];
    const auto number = value.is_number() ? value.get<double>() : -1.0;
    if (number < 0 || number != std::floor(number)) refuse_schema(key, at, "is no count");
    if (number > kMostCount) refuse_schema(key, at, fmt::format("is more than {}", kMostCount));
    return static_cast<std::uint32_t>(number);
  }

  static bool has_asserted_format(const ordered_json& rest, const std::string& at) {
    if (!rest.contains("format")) return false;
    if (!rest["format"].is_string()) refuse_schema("format", at, "is no text");
    return is_asserted(rest["format"].get<std::string>());
  }

  ExpressionPtr string(const ordered_json& rest, const std::string& at) {
    const auto min = count(rest, "minLength", at), max = count(rest, "maxLength", at);
    const bool has_pattern = rest.contains("pattern"), has_format = has_asserted_format(rest, at);
    if (has_pattern || has_format) {
      if (has_pattern && has_format)
        refuse_schema("format", at, "beside a pattern is not supported");
      const auto& value = rest[has_pattern ? "pattern" : "format"];
      if (!value.is_string()) refuse_schema("pattern", at, "is no text");
      auto pattern = value.get<std::string>();
      const auto* const known = has_format ? string_format(pattern) : nullptr;
      if (has_format && known == nullptr)
        refuse_schema("format", at, fmt::format("{} is not supported", pattern));
      // A format may have such lengths as they are.
      const bool is_short = min.value_or(0) > (known == nullptr ? 0 : known->least);
      const bool is_long = max && (known == nullptr || *max < known->most);
      if (is_short || is_long)
        refuse_schema(is_short ? "minLength" : "maxLength", at,
                      "beside a pattern or format is not supported");
      if (has_format) pattern = known->pattern;
      try {
        return sequence({literal("\""), regex_in_json_string(pattern), literal("\"")});
      } catch (const Error& error) {
        refuse_schema("pattern", at, fmt::format("is not supported: {}", error.what()));
      }
    }
    if (!min && !max) return json_.string();
    if (max && min.value_or(0) > *max) return never();
    return json_.string_of_length(min.value_or(0), max.value_or(Expression::kUnbounded));
  }

  // The tighter one of minimum and exclusiveMinimum, or of the maxima.
  static std::optional<Bound> bound(const ordered_json& rest,
                                    bool is_least,
                                    const std::string& at) {
    std::optional<Bound> found;
    double tightest = 0;
    for (const char* key : is_least ? std::array{"exclusiveMinimum", "minimum"}
                                    : std::array{"exclusiveMaximum", "maximum"}) {
      if (!rest.contains(key)) continue;
      if (!rest[key].is_number()) refuse_schema(key, at, "is no number");
      const auto value = rest[key].template get<double>();
      if (found && (is_least ? value <= tightest : value >= tightest)) continue;
      tightest = value;
      if (has_inexact_number(rest[key])) refuse_schema(key, at, "is beyond 64 bits");
      const auto decimal = read_decimal(rest[key].dump());
      if (!decimal) refuse_schema(key, at, "has more than 20 digits");
      found = Bound{.value = *decimal, .is_exclusive = key[0] == 'e'};
    }
    return found;
  }

  ExpressionPtr integer(const ordered_json& rest, const std::string& at) {
    const auto least = bound(rest, true, at), most = bound(rest, false, at);
    if (rest.contains("multipleOf")) return multiples(rest, least, most, at);
    return least || most ? numbers_between(least, most, kMostWholeDigits, 0) : json_.integer();
  }

  // Whole numbers. A fraction that divides numbers divides none of the doubles that readers make of
  // them.
  ExpressionPtr multiples(const ordered_json& rest,
                          const std::optional<Bound>& least,
                          const std::optional<Bound>& most,
                          const std::string& at) {
    const auto& given = rest["multipleOf"];
    const auto value = given.is_number() ? given.get<double>() : 0;
    if (!(value > 0)) refuse_schema("multipleOf", at, "is no number above 0");
    if (value != std::floor(value))
      refuse_schema("multipleOf", at, "is not supported but for whole numbers");
    auto digits = least || most ? std::size_t{0} : kMostWholeDigits;
    for (const auto& one : {least, most})
      digits = std::max(digits, one ? one->value.whole.size() : kMostWholeDigits);
    if (value * static_cast<double>(digits) >
        static_cast<double>(kMostRemainders * kMostWholeDigits))
      refuse_schema("multipleOf", at,
                    fmt::format("is not supported above {} without bounds that are near zero",
                                kMostRemainders));
    Multiples all(static_cast<std::uint64_t>(value), json_.rules());
    return numbers_between(least, most, kMostWholeDigits, 0, &all);
  }

  // Few enough digits for a double to tell each number from its bound.
  ExpressionPtr number(const ordered_json& rest, const std::string& at) {
    const auto least = bound(rest, true, at), most = bound(rest, false, at);
    if (rest.contains("multipleOf")) return multiples(rest, least, most, at);
    if (!least && !most) return json_.number();
    std::size_t whole = 0, fraction = 4;
    for (const auto& one : {least, most}) {
      if (!one) continue;
      whole = std::max(whole, one->value.whole.size());
      // One digit more lies behind a bound that is excluded.
      fraction = std::max(fraction, one->value.fraction.size() + (one->is_exclusive ? 1 : 0));
    }
    if (whole + fraction > kDigitsOfADouble)
      fraction = whole < kDigitsOfADouble ? kDigitsOfADouble - whole : 0;
    return numbers_between(least, most, fraction < 9 ? kDigitsOfADouble - fraction : 6, fraction);
  }

  CountRange counts(const ordered_json& rest,
                    const char* least,
                    const char* most,
                    const std::string& at) const {
    return {.min = count(rest, least, at).value_or(0),
            .max = count(rest, most, at).value_or(Expression::kUnbounded)};
  }

  ExpressionPtr array(const ordered_json& rest, const std::string& at) {
    auto range = counts(rest, "minItems", "maxItems", at);
    auto item = json_.value();
    if (rest.contains("items")) {
      if (rest["items"].is_array())
        refuse_schema("items", at, "as a list is not supported: that is prefixItems");
      item = json_.rules().add(of(rest["items"], at + "/items"));
    }
    std::vector<ExpressionPtr> first;
    if (rest.contains("prefixItems")) {
      const auto& all = list(rest, "prefixItems", at);
      for (std::size_t i = 0; i < all.size() && i < range.max; ++i)
        first.push_back(json_.rules().add(of(all[i], fmt::format("{}/prefixItems/{}", at, i))));
    }
    if (rest.value("items", ordered_json()) == false)
      range.max = std::min(range.max, static_cast<std::uint32_t>(first.size()));
    if (range.min > range.max) return never();
    auto items = is_unique(rest, at) && range.max > 1 ? unique_items(rest, range, at)
                                                      : items_text(json_, item, first, range);
    return sequence({literal("["), json_.space(), std::move(items), literal("]")});
  }

  static bool is_unique(const ordered_json& rest, const std::string& at) {
    const auto unique = rest.value("uniqueItems", ordered_json(false));
    if (!unique.is_boolean()) refuse_schema("uniqueItems", at, "is neither true nor false");
    return unique.get<bool>();
  }

  // Items are one of a few constants; no automaton remembers others.
  ExpressionPtr unique_items(const ordered_json& rest, CountRange range, const std::string& at) {
    const auto refuse = [&] {
      refuse_schema("uniqueItems", at,
                    fmt::format("is not supported but for items that are one of {} constants at "
                                "most (enum, const, booleans)",
                                kMostUnique));
    };
    if (!rest.contains("items") || rest.contains("prefixItems")) refuse();
    ordered_json item = rest["items"];
    for (int depth = 0; item.is_object() && item.contains("$ref") && depth < kDeepestSchema;
         ++depth)
      item = merged(item, at + "/items");
    if (!item.is_object()) refuse();
    if (item.value("type", ordered_json()) == "boolean" && !item.contains("enum") &&
        !item.contains("const"))
      item["enum"] = {true, false};
    if (!item.contains("enum") && !item.contains("const")) refuse();
    std::vector<ordered_json> values;
    for (auto& value : constants_of(item, at + "/items"))
      if (std::ranges::find(values, value) == values.end()) values.push_back(std::move(value));
    if (values.size() > kMostUnique) refuse();
    std::vector<ExpressionPtr> ways;
    for (const auto& value : values) ways.push_back(json_.rules().add(literal(value.dump())));
    return distinct_items_text(json_, ways, range);
  }

  ExpressionPtr object(const ordered_json& rest, const std::string& at) {
    const auto required = rest.value("required", ordered_json::array());
    const auto properties = rest.value("properties", ordered_json::object());
    if (!properties.is_object()) refuse_schema("properties", at, "is no object");
    if (!required.is_array() ||
        !std::ranges::all_of(required, [](const auto& one) { return one.is_string(); }))
      refuse_schema("required", at, "is no list of names");
    for (const char* key : {"patternProperties", "propertyNames"})
      if (rest.contains(key) && (!properties.empty() || !required.empty()))
        refuse_schema(key, at, "beside properties or required is not supported");
    const auto others = rest.value("additionalProperties", ordered_json(properties.empty()));
    const auto other =
        others == false ? nullptr : json_.rules().add(of(others, at + "/additionalProperties"));
    std::vector<Member> members;
    std::vector<std::string> names;
    const auto add = [&](const std::string& name, const ExpressionPtr& value) {
      if (name.size() > kLongestName)
        refuse_schema("properties", at, "has a name that is too long");
      const bool is_required = std::ranges::find(required, ordered_json(name)) != required.end();
      members.push_back({json_.rules().add(json_.member(literal(ordered_json(name).dump()), value)),
                         is_required});
      names.push_back(name);
    };
    const auto of_properties = at + "/properties/";
    for (const auto& [name, schema] : properties.items())
      add(name, of(schema, of_properties + name));
    // A name that is required is expected, also where others are not.
    const auto unlisted = other                                   ? other
                          : rest.contains("additionalProperties") ? never()
                                                                  : json_.value();
    for (const auto& name : required)
      if (!properties.contains(name.get<std::string>())) add(name.get<std::string>(), unlisted);
    ExpressionPtr member;
    if (rest.contains("patternProperties"))
      member = pattern_member(rest, at);
    else if (other)
      member = json_.member(other_key(rest, names, at), other);
    if (member) member = json_.rules().add(std::move(member));
    auto all = members_text(json_, members, member, member_counts(rest, members.size(), at));
    return sequence({literal("{"), json_.space(), std::move(all), literal("}")});
  }

  // Keys of two patterns, or of one and of other members, might be the same.
  ExpressionPtr pattern_member(const ordered_json& rest, const std::string& at) {
    const auto& all = rest["patternProperties"];
    if (!all.is_object()) refuse_schema("patternProperties", at, "is no object");
    if (all.size() != 1 || rest.contains("propertyNames") ||
        rest.value("additionalProperties", ordered_json(false)) != false)
      refuse_schema("patternProperties", at,
                    "is not supported but with one pattern, and no names of other keywords");
    const auto& pattern = all.begin().key();
    const auto place = fmt::format("{}/patternProperties/{}", at, pattern);
    return json_.member(string({{"pattern", pattern}}, place), of(all.begin().value(), place));
  }

  ExpressionPtr other_key(const ordered_json& rest,
                          const std::vector<std::string>& names,
                          const std::string& at) {
    if (!rest.contains("propertyNames")) return json_.key_except(names);
    const auto place = at + "/propertyNames";
    return of(merge(document_, rest["propertyNames"], {{"type", "string"}}, place), place);
  }

  CountRange member_counts(const ordered_json& rest,
                           std::size_t num_listed,
                           const std::string& at) {
    const auto range = counts(rest, "minProperties", "maxProperties", at);
    const bool counts_all = range.max < num_listed || range.min > 1;
    if (counts_all && num_listed > kMostCounted)
      refuse_schema(range.min > 1 ? "minProperties" : "maxProperties", at,
                    fmt::format("is not supported with more than {} properties", kMostCounted));
    if (range.min > num_listed + 1)
      refuse_schema("minProperties", at,
                    "is not supported beyond the properties that are listed and one more");
    return range;
  }

  const ordered_json& root_;
  Document document_;
  JsonText json_;
  std::map<std::string, std::uint32_t> rules_;  // by pointer
  std::deque<std::pair<std::uint32_t, std::string>> pending_;
  int num_schemas_ = 0;
  int depth_ = 0;
};

}  // namespace

ExpressionPtr json_schema(const ordered_json& schema, const std::string& at, Rules& rules) {
  return SchemaReader(schema, rules).read(at);
}

}  // namespace ferry::rollout::grammar
