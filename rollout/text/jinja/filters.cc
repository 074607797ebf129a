// The filters.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>

#include "rollout/text/jinja/library.h"
#include "rollout/text/unicode/unicode.h"

namespace ferry::rollout::text::jinja {
namespace {

using Filter = Value (*)(const Value& value, const Arguments& arguments);

Value tojson(const Value& value, const Arguments& arguments) {
  const Parameters given("tojson", arguments,
                         {"ensure_ascii", "indent", "separators", "sort_keys"});
  JsonFormat format{.ensure_ascii = given.flag(0, false), .sort_keys = given.flag(3, false)};
  if (given.has(1)) {
    format.indented = true;
    format.item_separator = ",";
    format.indent =
        given.at(1).is_string()
            ? given.at(1).string()
            : std::string(
                  static_cast<std::size_t>(std::clamp<std::int64_t>(given.integer(1, 0), 0, 1000)),
                  ' ');
  }
  if (given.has(2)) {
    const auto separators = given.at(2).iterate();
    if (separators.size() != 2) fail_template("the separators of tojson are not two");
    format.item_separator = separators[0].str();
    format.key_separator = separators[1].str();
  }
  return bounded(to_json(value, format));
}

Value attribute_or_default(const Value& item,
                           const Parameters& given,
                           std::size_t name,
                           std::size_t otherwise) {
  auto found = nested_item(item, given.at(name));
  return found.is_undefined() && given.given(otherwise) != nullptr ? given.at(otherwise) : found;
}

Arguments rest_of(const Arguments& arguments, std::size_t from) {
  Arguments rest{.named = arguments.named};
  rest.positional.assign(arguments.positional.begin() + static_cast<std::ptrdiff_t>(from),
                         arguments.positional.end());
  return rest;
}

// map("upper"), map(attribute="name", default=x). A value that is false, as none, has no items.
Value map(const Value& value, const Arguments& arguments) {
  if (!value.truthy()) return List{};
  List found;
  if (!arguments.positional.empty()) {
    const auto name = arguments.positional[0].str();
    const auto rest = rest_of(arguments, 1);
    for (const auto& item : value.iterate()) found.items.push_back(apply_filter(name, item, rest));
  } else {
    const Parameters given("map", arguments, {"attribute", "default"});
    for (const auto& item : value.iterate()) {
      found.items.push_back(attribute_or_default(item, given, 0, 1));
    }
  }
  return found;
}

// select("test", ...) and selectattr("attribute", "test", ...); `keep` false: reject.
Value select(const Value& value, const Arguments& arguments, bool by_attribute, bool keep) {
  if (!value.truthy()) return List{};
  if (!arguments.named.empty()) fail_template("an argument by name of select is not supported");
  const std::size_t first = by_attribute ? 1 : 0;
  if (arguments.positional.size() < first) fail_template("selectattr lacks its attribute");
  const bool tested = arguments.positional.size() > first;
  const auto test = tested ? arguments.positional[first].str() : "";
  const auto rest = tested ? rest_of(arguments, first + 1) : Arguments();
  List found;
  for (const auto& item : value.iterate()) {
    const auto looked_at = by_attribute ? nested_item(item, arguments.positional[0]) : item;
    if ((tested ? apply_test(test, looked_at, rest) : looked_at.truthy()) == keep) {
      found.items.push_back(item);
    }
  }
  return found;
}

Value join(const Value& value, const Arguments& arguments) {
  const Parameters given("join", arguments, {"d", "attribute"});
  const auto separator = given.has(0) ? given.at(0).str() : "";
  std::string joined;
  bool first = true;
  for (const auto& item : value.iterate()) {
    if (!std::exchange(first, false)) joined += separator;
    joined =
        bounded(std::move(joined) + (given.has(1) ? nested_item(item, given.at(1)) : item).str());
  }
  return joined;
}

// In lower case unless `case_sensitive`: Jinja ignores case by default.
Value folded(const Value& value, bool case_sensitive) {
  return value.is_string() && !case_sensitive ? Value(lowercase(value.string())) : value;
}

// The part of an item that is compared: by the parameters `case_sensitive` and the next one, its
// attribute.
Value key_of(const Value& item, const Parameters& given, std::size_t case_sensitive) {
  return folded(
      given.has(case_sensitive + 1) ? nested_item(item, given.at(case_sensitive + 1)) : item,
      given.flag(case_sensitive, false));
}

Value sort(const Value& value, const Arguments& arguments) {
  const Parameters given("sort", arguments, {"reverse", "case_sensitive", "attribute"});
  List sorted{.items = value.iterate()};
  const bool reverse = given.flag(0, false);
  std::ranges::stable_sort(sorted.items, [&](const Value& a, const Value& b) {
    const auto left = key_of(reverse ? b : a, given, 1);
    return less(left, key_of(reverse ? a : b, given, 1));
  });
  return sorted;
}

Value dictsort(const Value& value, const Arguments& arguments) {
  const Parameters given("dictsort", arguments, {"case_sensitive", "by", "reverse"});
  if (!value.is_dict()) fail_template(fmt::format("dictsort of {}", value.type_name()));
  const auto place = given.has(1) && given.string(1) == "value" ? std::int64_t{1} : std::int64_t{0};
  Arguments by;
  by.named = {{"attribute", place},
              {"reverse", given.flag(2, false)},
              {"case_sensitive", given.flag(0, false)}};
  return sort(dict_method(value, "items").function().call({}), by);
}

Value unique(const Value& value, const Arguments& arguments) {
  const Parameters given("unique", arguments, {"case_sensitive", "attribute"});
  std::vector<Value> seen;
  List found;
  for (const auto& item : value.iterate()) {
    const auto key = key_of(item, given, 0);
    if (std::ranges::find(seen, key) != seen.end()) continue;
    seen.push_back(key);
    found.items.push_back(item);
  }
  return found;
}

template <bool Largest>
Value extreme(const Value& value, const Arguments& arguments) {
  const Parameters given(Largest ? "max" : "min", arguments, {"case_sensitive", "attribute"});
  const auto key = [&](const Value& item) { return key_of(item, given, 0); };
  const auto items = value.iterate();
  if (items.empty()) return Undefined{"No aggregated item, sequence was empty."};
  auto best = items[0];
  for (const auto& item : items) {
    if (Largest ? less(key(best), key(item)) : less(key(item), key(best))) best = item;
  }
  return best;
}

Value sum(const Value& value, const Arguments& arguments) {
  const Parameters given("sum", arguments, {"attribute", "start"});
  Value total = given.given(1) == nullptr ? Value(std::int64_t{0}) : given.at(1);
  for (const auto& item : value.iterate()) {
    total = binary("+", total, given.has(0) ? nested_item(item, given.at(0)) : item);
  }
  return total;
}

Value indent(const Value& value, const Arguments& arguments) {
  const Parameters given("indent", arguments, {"width", "first", "blank"});
  const bool by_text = given.has(0) && given.at(0).is_string();
  const auto width = std::clamp<std::int64_t>(by_text ? 0 : given.integer(0, 4), 0, 1000);
  const auto margin =
      by_text ? given.at(0).string() : std::string(static_cast<std::size_t>(width), ' ');
  std::string indented;
  Arguments none;
  auto text = value.str() + "\n";  // Jinja adds it, so that a last empty line counts
  const auto lines = string_method(text, "splitlines").function().call(none).iterate();
  for (std::size_t i = 0; i < lines.size(); ++i) {
    const auto& line = lines[i].string();
    if (i > 0) indented += "\n";
    if (i == 0 ? given.flag(1, false) : !line.empty() || given.flag(2, false)) indented += margin;
    indented += line;
    indented = bounded(std::move(indented));
  }
  return indented;
}

Value to_int(const Value& value, const Arguments& arguments) {
  const Parameters given("int", arguments, {"default", "base"});
  if (given.has(1)) fail_template("the base of int is not supported");
  auto otherwise = given.given(0) == nullptr ? Value(std::int64_t{0}) : given.at(0);
  if (value.is_int() || value.is_bool()) return value.integer();
  if (value.is_wide_int()) return value;
  double real = value.is_float() ? value.real() : NAN;
  if (value.is_string()) {
    auto text = stripped(value.string(), nullptr, true, true);
    if (text.starts_with('+')) text.erase(0, 1);
    std::int64_t number = 0;
    const auto* const end = text.data() + text.size();
    const auto [stopped, error] = std::from_chars(text.data(), end, number);
    if (error == std::errc() && stopped == end) return number;
    const auto [real_stopped, real_error] = std::from_chars(text.data(), end, real);
    if (real_error != std::errc() || real_stopped != end) return otherwise;
  }
  if (!std::isfinite(real) || std::abs(real) >= 9.2e18) return otherwise;
  return static_cast<std::int64_t>(real);
}

Value to_float(const Value& value, const Arguments& arguments) {
  const Parameters given("float", arguments, {"default"});
  if (value.is_number()) return value.real();
  if (value.is_string()) {
    const auto text = stripped(value.string(), nullptr, true, true);
    double number = 0;
    const auto* const end = text.data() + text.size();
    const auto [stopped, error] = std::from_chars(text.data(), end, number);
    if (error == std::errc() && stopped == end) return number;
  }
  return given.given(0) == nullptr ? Value(0.0) : given.at(0);
}

Value rounded(const Value& value, const Arguments& arguments) {
  const Parameters given("round", arguments, {"precision", "method"});
  if (!value.is_number()) fail_template(fmt::format("round of {}", value.type_name()));
  if (given.has(1) && given.string(1) != "common") {
    fail_template("the method of round is not supported");
  }
  if (!value.is_float()) return value.integer();
  const auto digits = std::clamp<std::int64_t>(given.integer(0, 0), 0, 17);
  return std::stod(fmt::format("{:.{}f}", value.real(), digits));
}

Value length(const Value& value, const Arguments&) {
  return static_cast<std::int64_t>(value.length());
}
Value as_text(const Value& value, const Arguments&) {
  return value.str();
}
Value first_of(const Value& value, const Arguments&) {
  const auto items = value.iterate();
  return items.empty() ? Value(Undefined{"No first item, sequence was empty."}) : items.front();
}
Value last_of(const Value& value, const Arguments&) {
  const auto items = value.iterate();
  return items.empty() ? Value(Undefined{"No last item, sequence was empty."}) : items.back();
}

Value with_default(const Value& value, const Arguments& arguments) {
  const Parameters given("default", arguments, {"default_value", "boolean"});
  const bool missing = value.is_undefined() || (given.flag(1, false) && !value.truthy());
  if (!missing) return value;
  return given.given(0) == nullptr ? Value("") : given.at(0);
}

Value escaped(const Value& value, const Arguments&) {
  static constexpr std::string_view kSpecial = "&<>\"'";
  static constexpr std::string_view kEntities[] = {"&amp;", "&lt;", "&gt;", "&#34;", "&#39;"};
  std::string text;
  for (const char c : value.str()) {
    const auto found = kSpecial.find(c);
    if (found == kSpecial.npos) {
      text.push_back(c);
    } else {
      text += kEntities[found];
    }
  }
  return bounded(std::move(text));
}

// A method of strings, applied to any value's text.
template <const char* Name>
Value as_method(const Value& value, const Arguments& arguments) {
  return string_method(value.str(), Name).function().call(arguments);
}
constexpr char kUpper[] = "upper", kLower[] = "lower", kCapitalize[] = "capitalize",
               kTrim[] = "strip";

Value titled(const Value& value, const Arguments&) {
  std::string text;
  bool begins = true;  // Jinja's title() begins words behind white space, hyphens and brackets
  for (const auto& c : Value(value.str()).iterate()) {
    text += begins ? uppercase(c.string()) : lowercase(c.string());
    std::size_t at = 0;
    const auto code = next_code_point(c.string(), at);
    begins = CodePointSet::named("WhiteSpace")->contains(code) || code == '-' || code == '(' ||
             code == '{' || code == '[' || code == '<';
  }
  return text;
}

Value reversed(const Value& value, const Arguments&) {
  auto items = value.iterate();
  std::ranges::reverse(items);
  if (!value.is_string()) return List{.items = std::move(items)};
  std::string text;
  for (const auto& c : items) text += c.string();
  return text;
}

Value items_of(const Value& value, const Arguments&) {
  if (value.is_undefined()) return List{};
  if (!value.is_dict() || value.dict().is_namespace) {
    fail_template("Can only get item pairs from a mapping.");
  }
  return dict_method(value, "items").function().call({});
}

Value replace_filter(const Value& value, const Arguments& arguments) {
  const Parameters given("replace", arguments, {"old", "new", "count"});
  return replaced(value.str(), given.at(0).str(), given.at(1).str(), given.integer(2, -1));
}

const std::map<std::string_view, Filter>& filters() {
  static const std::map<std::string_view, Filter> known{
      {"abs",
       [](const Value& value, const Arguments&) {
         return less(value, std::int64_t{0}) ? negative(value) : value;
       }},
      {"capitalize", as_method<kCapitalize>},
      {"count", length},
      {"d", with_default},
      {"default", with_default},
      {"dictsort", dictsort},
      {"e", escaped},
      {"escape", escaped},
      {"first", first_of},
      {"float", to_float},
      {"indent", indent},
      {"int", to_int},
      {"items", items_of},
      {"join", join},
      {"last", last_of},
      {"length", length},
      {"list",
       [](const Value& v, const Arguments&) -> Value { return List{.items = v.iterate()}; }},
      {"lower", as_method<kLower>},
      {"map", map},
      {"max", extreme<true>},
      {"min", extreme<false>},
      {"reject", [](const Value& v, const Arguments& a) { return select(v, a, false, false); }},
      {"rejectattr", [](const Value& v, const Arguments& a) { return select(v, a, true, false); }},
      {"replace", replace_filter},
      {"reverse", reversed},
      {"round", rounded},
      {"safe", as_text},
      {"select", [](const Value& v, const Arguments& a) { return select(v, a, false, true); }},
      {"selectattr", [](const Value& v, const Arguments& a) { return select(v, a, true, true); }},
      {"sort", sort},
      {"string", as_text},
      {"sum", sum},
      {"title", titled},
      {"tojson", tojson},
      {"trim", as_method<kTrim>},
      {"unique", unique},
      {"upper", as_method<kUpper>},
  };
  return known;
}

}  // namespace

bool is_filter(std::string_view name) {
  return filters().contains(name);
}

Value apply_filter(std::string_view name, const Value& value, const Arguments& arguments) {
  const auto found = filters().find(name);
  if (found == filters().end()) fail_template(fmt::format("the filter {} is not supported", name));
  return found->second(value, arguments);
}

}  // namespace ferry::rollout::text::jinja
