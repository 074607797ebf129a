// The methods of strings, lists and dictionaries.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>

#include "rollout/text/jinja/library.h"
#include "rollout/text/unicode/unicode.h"

namespace ferry::rollout::text::jinja {
namespace {

struct StringMethod {
  std::vector<std::string_view> parameters{};
  Value (*call)(const std::string& text, const Parameters& given) = nullptr;
};

// Python's str.isspace().
bool is_space(char32_t c) {
  return CodePointSet::named("WhiteSpace")->contains(c) || (c >= 0x1C && c <= 0x1F);
}

bool holds(const std::u32string& characters, char32_t c) {
  return characters.find(c) != characters.npos;
}

// Python's split: at white space where there is no separator.
template <bool FromRight>
Value split(const std::string& text, const Parameters& given) {
  auto left = given.integer(1, -1);
  const auto may_cut = [&] { return left < 0 || left-- > 0; };
  std::vector<Value> parts;
  std::string_view rest = text;
  if (given.has(0)) {
    const auto& separator = given.string(0);
    if (separator.empty()) fail_template("empty separator");
    while (true) {
      const auto cut = FromRight ? rest.rfind(separator) : rest.find(separator);
      if (cut == rest.npos || !may_cut()) break;
      const auto behind = rest.substr(cut + separator.size()), before = rest.substr(0, cut);
      parts.emplace_back(FromRight ? behind : before);
      rest = FromRight ? before : behind;
    }
    parts.emplace_back(rest);
  } else {
    const auto trim = [&](std::string_view whole) {
      return stripped(whole, nullptr, !FromRight, FromRight);
    };
    auto remaining = trim(rest);
    while (!remaining.empty()) {
      std::size_t begin = 0, end = remaining.size();  // of the first or the last word
      for (std::size_t at = 0; at < remaining.size();) {
        const auto here = at;
        if (!is_space(next_code_point(remaining, at))) continue;
        if (FromRight) {
          begin = at;
        } else {
          end = here;
          break;
        }
      }
      const bool whole = begin == 0 && end == remaining.size();
      if (!may_cut()) {
        parts.emplace_back(remaining);
        break;
      }
      parts.emplace_back(std::string_view(remaining).substr(begin, end - begin));
      if (whole) break;
      remaining = trim(FromRight ? remaining.substr(0, begin) : remaining.substr(end));
    }
  }
  if (FromRight) std::ranges::reverse(parts);
  return bounded(List{.items = std::move(parts)});
}

Value splitlines(const std::string& text, const Parameters& given) {
  const bool keep = given.flag(0, false);
  List lines;
  std::size_t begin = 0;
  for (std::size_t at = 0; at < text.size();) {
    const auto end = at;
    const auto c = next_code_point(text, at);
    const bool breaks = (c >= 0x0A && c <= 0x0D) || (c >= 0x1C && c <= 0x1E) || c == 0x85 ||
                        c == 0x2028 || c == 0x2029;
    if (!breaks) continue;
    if (c == '\r' && at < text.size() && text[at] == '\n') ++at;
    lines.items.emplace_back(std::string_view(text).substr(begin, (keep ? at : end) - begin));
    begin = at;
  }
  if (begin < text.size()) lines.items.emplace_back(std::string_view(text).substr(begin));
  return bounded(std::move(lines));
}

// startswith, endswith: of a string or any of a tuple.
template <typename Fits>
bool fits_any(const Value& wanted, Fits&& fits) {
  if (wanted.is_string()) return fits(wanted.string());
  if (!wanted.is_list() || !wanted.list().is_tuple) {
    fail_template(fmt::format("startswith or endswith of {}", wanted.type_name()));
  }
  return std::ranges::any_of(
      wanted.list().items, [&](const Value& one) { return one.is_string() && fits(one.string()); });
}

std::int64_t position(const std::string& text, std::size_t byte) {
  return byte == text.npos ? -1 : static_cast<std::int64_t>(Value(text.substr(0, byte)).length());
}

template <bool (*Holds)(char32_t)>
Value all_are(const std::string& text, const Parameters&) {
  const auto characters = to_code_points(text);
  return !characters.empty() && std::ranges::all_of(characters, Holds);
}
bool is_letter(char32_t c) {
  return CodePointSet::named("L")->contains(c);
}
bool is_decimal(char32_t c) {
  return CodePointSet::named("Nd")->contains(c);
}
bool is_letter_or_digit(char32_t c) {
  return is_letter(c) || CodePointSet::named("N")->contains(c);
}

template <bool Left, bool Right>
Value strip(const std::string& text, const Parameters& given) {
  return stripped(text, given.has(0) ? given.given(0) : nullptr, Left, Right);
}

Value joined_parts(const std::string& text, const Parameters& given) {
  std::string joined;
  for (bool first = true; const auto& part : given.at(0).iterate()) {
    if (!part.is_string()) fail_template("join() of what are not strings");
    if (!std::exchange(first, false)) joined += text;
    joined = bounded(std::move(joined) + part.string());
  }
  return joined;
}

Value index_of(const std::string& text, const Parameters& given) {
  const auto at = text.find(given.string(0));
  if (at == text.npos) fail_template("substring not found");
  return position(text, at);
}

Value count_of(const std::string& text, const Parameters& given) {
  const auto& part = given.string(0);
  if (part.empty()) return static_cast<std::int64_t>(Value(text).length() + 1);
  std::int64_t found = 0;
  for (auto at = text.find(part); at != text.npos; at = text.find(part, at + part.size())) ++found;
  return found;
}

Value title_of(const std::string& text, const Parameters&) {
  std::string titled;
  bool in_word = false;
  for (const auto& c : Value(text).iterate()) {
    titled += in_word ? lowercase(c.string()) : uppercase(c.string());
    std::size_t at = 0;
    in_word = is_letter(next_code_point(c.string(), at));
  }
  return titled;
}

Value startswith(const std::string& text, const Parameters& given) {
  return fits_any(given.at(0), [&](auto& part) { return text.starts_with(part); });
}
Value endswith(const std::string& text, const Parameters& given) {
  return fits_any(given.at(0), [&](auto& part) { return text.ends_with(part); });
}

Value removeprefix(const std::string& text, const Parameters& given) {
  const auto& part = given.string(0);
  return text.starts_with(part) ? text.substr(part.size()) : text;
}
Value removesuffix(const std::string& text, const Parameters& given) {
  const auto& part = given.string(0);
  return text.ends_with(part) ? text.substr(0, text.size() - part.size()) : text;
}

const std::map<std::string_view, StringMethod>& string_methods() {
  static const std::map<std::string_view, StringMethod> methods{
      {"capitalize", {{}, [](auto& text, auto&) -> Value { return capitalized(text); }}},
      {"count", {{"sub"}, count_of}},
      {"endswith", {{"suffix"}, endswith}},
      {"find",
       {{"sub"},
        [](auto& text, auto& given) -> Value {
          return position(text, text.find(given.string(0)));
        }}},
      {"index", {{"sub"}, index_of}},
      {"isalnum", {{}, all_are<is_letter_or_digit>}},
      {"isalpha", {{}, all_are<is_letter>}},
      {"isdecimal", {{}, all_are<is_decimal>}},
      {"isdigit", {{}, all_are<is_decimal>}},
      {"isspace", {{}, all_are<is_space>}},
      {"join", {{"iterable"}, joined_parts}},
      {"lower", {{}, [](auto& text, auto&) -> Value { return lowercase(text); }}},
      {"lstrip", {{"chars"}, strip<true, false>}},
      {"removeprefix", {{"prefix"}, removeprefix}},
      {"removesuffix", {{"suffix"}, removesuffix}},
      {"replace",
       {{"old", "new", "count"},
        [](auto& text, auto& given) -> Value {
          return replaced(text, given.string(0), given.string(1), given.integer(2, -1));
        }}},
      {"rfind",
       {{"sub"},
        [](auto& text, auto& given) -> Value {
          return position(text, text.rfind(given.string(0)));
        }}},
      {"rsplit", {{"sep", "maxsplit"}, split<true>}},
      {"rstrip", {{"chars"}, strip<false, true>}},
      {"split", {{"sep", "maxsplit"}, split<false>}},
      {"splitlines", {{"keepends"}, splitlines}},
      {"startswith", {{"prefix"}, startswith}},
      {"strip", {{"chars"}, strip<true, true>}},
      {"title", {{}, title_of}},
      {"upper", {{}, [](auto& text, auto&) -> Value { return uppercase(text); }}},
  };
  return methods;
}

// The value of {}, {0} or {name}; `next` is the number of the next {}.
Value formatted_value(std::string_view field, const Arguments& given, std::size_t& next) {
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  if (!std::ranges::all_of(field, is_digit)) {
    const auto named = std::ranges::find(given.named, field, [](auto& one) { return one.first; });
    if (named == given.named.end()) fail_template(fmt::format("'{}'", field));  // a KeyError
    return named->second;
  }
  const auto index = field.empty()       ? next++
                     : field.size() < 10 ? static_cast<std::size_t>(std::stoi(std::string(field)))
                                         : given.positional.size();
  if (index >= given.positional.size()) {
    fail_template("Replacement index out of range for positional args tuple");
  }
  return given.positional[index];
}

// Python's str.format() with fields that are names, numbers or empty.
Value formatted(std::string_view text, const Arguments& given) {
  std::string written;
  std::size_t next = 0;
  for (std::size_t at = 0; at < text.size(); ++at) {
    const char c = text[at];
    const bool twice = at + 1 < text.size() && text[at + 1] == c;
    if (c != '{' && c != '}') {
      written.push_back(c);
    } else if (twice) {
      written.push_back(c);
      ++at;
    } else {
      const auto end = c == '{' ? text.find('}', at) : std::string_view::npos;
      if (end == std::string_view::npos) {
        fail_template(fmt::format("Single '{}' encountered in format string", c));
      }
      const auto field = text.substr(at + 1, end - at - 1);
      if (field.find_first_of("!:.[{") != std::string_view::npos) {
        fail_template(fmt::format("the field {{{}}} of format is not supported", field));
      }
      written = bounded(std::move(written) + formatted_value(field, given, next).str());
      at = end;
    }
  }
  return written;
}

constexpr std::array<std::string_view, 18> kOtherStringMethods = {
    "casefold",     "center",    "encode",    "expandtabs",  "format_map", "isascii",
    "isidentifier", "islower",   "isnumeric", "isprintable", "istitle",    "isupper",
    "ljust",        "partition", "rindex",    "rpartition",  "swapcase",   "zfill"};

}  // namespace

std::string stripped(std::string_view text, const Value* characters, bool left, bool right) {
  std::u32string wanted;
  if (characters != nullptr) {
    if (!characters->is_string()) fail_template("strip() of what is not a string");
    wanted = to_code_points(characters->string());
  }
  const auto drops = [&](char32_t c) {
    return characters == nullptr ? is_space(c) : holds(wanted, c);
  };
  while (left && !text.empty()) {
    std::size_t behind = 0;
    if (!drops(next_code_point(text, behind))) break;
    text.remove_prefix(behind);
  }
  while (right && !text.empty()) {
    const auto last = previous_boundary(text, text.size());
    auto behind = last;
    if (!drops(next_code_point(text, behind))) break;
    text = text.substr(0, last);
  }
  return std::string(text);
}

std::string replaced(std::string_view text,
                     std::string_view from,
                     std::string_view to,
                     std::int64_t most) {
  std::string found;
  std::size_t copied = 0, at = 0;
  for (; most != 0; --most) {
    at = text.find(from, at);
    if (at == text.npos) break;
    found = bounded(std::move(found.append(text.substr(copied, at - copied)).append(to)));
    copied = at + from.size();
    if (!from.empty()) {
      at = copied;
    } else if (at == text.size()) {
      break;
    } else {
      at += utf8_length(text[at]);  // between all characters
    }
  }
  return bounded(std::move(found.append(text.substr(copied))));
}

std::string capitalized(std::string_view text) {
  if (text.empty()) return "";
  const auto first = utf8_length(text[0]);
  return uppercase(text.substr(0, first)) + lowercase(text.substr(first));
}

Value string_method(const Value& object, std::string_view name) {
  const auto found = string_methods().find(name);
  if (found != string_methods().end()) {
    return Function{std::string(name), [text = object.string(), found](const Arguments& arguments) {
                      const auto& [own_name, method] = *found;
                      return method.call(text, Parameters(own_name, arguments, method.parameters));
                    }};
  }
  if (name == "format") {
    return Function{"format", [text = object.string()](const Arguments& arguments) {
                      return formatted(text, arguments);
                    }};
  }
  if (std::ranges::find(kOtherStringMethods, name) != kOtherStringMethods.end()) {
    fail_template(fmt::format("the method {} of a string is not supported", name));
  }
  return Undefined{};
}

Value list_method(const Value& object, std::string_view name) {
  const auto bind = [&](auto method) -> Value {
    return Function{std::string(name), [object, method](const Arguments& arguments) -> Value {
                      const Parameters given("list method", arguments, {"value"});
                      return method(object.list().items, given.at(0));
                    }};
  };
  if (name == "count") {
    return bind([](const std::vector<Value>& items, const Value& value) {
      return static_cast<std::int64_t>(std::ranges::count(items, value));
    });
  }
  if (name == "index") {
    return bind([](const std::vector<Value>& items, const Value& value) {
      const auto found = std::ranges::find(items, value);
      if (found == items.end()) fail_template(fmt::format("{} is not in list", value.repr()));
      return static_cast<std::int64_t>(found - items.begin());
    });
  }
  static constexpr std::array<std::string_view, 8> kChanging = {
      "append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"};
  if (!object.list().is_tuple && std::ranges::find(kChanging, name) != kChanging.end()) {
    fail_template(fmt::format("the method {} would change a list, which templates may not", name));
  }
  if (!object.list().is_tuple && name == "copy") {
    return Function{"copy", [object](const Arguments&) -> Value { return object.list(); }};
  }
  return Undefined{};
}

Value dict_method(const Value& object, std::string_view name) {
  const auto bind = [&](auto method) -> Value {
    return Function{std::string(name), [object, method](const Arguments& arguments) -> Value {
                      return method(object.dict(), arguments);
                    }};
  };
  const auto list = [&](auto value_of) {
    return bind([value_of](const Dict& dict, const Arguments&) -> Value {
      List values;
      for (const auto& member : dict.items) values.items.push_back(value_of(member));
      return values;
    });
  };
  if (name == "get") {
    return bind([](const Dict& dict, const Arguments& arguments) -> Value {
      const Parameters given("get", arguments, {"key", "default"});
      given.at(0).require_hash();
      const auto* found = dict.find_key(given.at(0));
      if (found != nullptr) return *found;
      return given.given(1) == nullptr ? Value() : *given.given(1);
    });
  }
  if (name == "items") {
    return list([](const auto& member) -> Value {
      return List{.items = {member.first, member.second}, .is_tuple = true};
    });
  }
  if (name == "keys") return list([](const auto& member) -> Value { return member.first; });
  if (name == "values") return list([](const auto& member) -> Value { return member.second; });
  if (name == "copy") {
    return bind([](const Dict& dict, const Arguments&) -> Value { return dict; });
  }
  static constexpr std::array<std::string_view, 6> kChanging = {"clear",   "fromkeys",   "pop",
                                                                "popitem", "setdefault", "update"};
  if (std::ranges::find(kChanging, name) != kChanging.end()) {
    fail_template(
        fmt::format("the method {} would change a dictionary, which templates may not", name));
  }
  return Undefined{};
}

}  // namespace ferry::rollout::text::jinja
