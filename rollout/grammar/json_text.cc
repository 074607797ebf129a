#include "rollout/grammar/json_text.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

namespace ferry::rollout::grammar {
namespace {

constexpr std::uint32_t kJsonDigits = 18;  // before the point and behind it; of an int64

ExpressionPtr any_byte_of(std::string_view all) {
  std::vector<ExpressionPtr> ways;
  for (const char one : all)
    ways.push_back(bytes(static_cast<std::uint8_t>(one), static_cast<std::uint8_t>(one)));
  return choice(std::move(ways));
}

ExpressionPtr json_digits(std::uint32_t min, std::uint32_t max) {
  return repeat(bytes('0', '9'), min, max);
}

// \uXXXX of any character that is not half of a pair.
ExpressionPtr unicode_escape() {
  const auto hex = choice({bytes('0', '9'), bytes('A', 'F'), bytes('a', 'f')});
  const auto not_d =
      choice({bytes('0', '9'), bytes('A', 'C'), bytes('E', 'F'), bytes('a', 'c'), bytes('e', 'f')});
  return sequence({literal("u"),
                   choice({sequence({not_d, hex}), sequence({any_byte_of("dD"), bytes('0', '7')})}),
                   hex, hex});
}

// A character within a string, escaped where JSON has to.
std::string escaped_character(char32_t c) {
  std::string bytes;
  text::append_utf8(c, bytes);
  const auto quoted = nlohmann::json(bytes).dump();
  return quoted.substr(1, quoted.size() - 2);
}

// Strings that leave a tree of names, and so are none of them.
ExpressionPtr outside_of(const std::vector<std::u32string>& names,
                         std::size_t depth,
                         const ExpressionPtr& any) {
  std::map<char32_t, std::vector<std::u32string>> below;
  bool is_name = false;
  for (const auto& name : names) {
    if (name.size() == depth)
      is_name = true;
    else
      below[name[depth]].push_back(name);
  }
  std::vector<text::CodePointRange> taken{{0, 0x1F}, {'"', '"'}, {'\\', '\\'}};
  std::vector<ExpressionPtr> ways;
  if (!is_name) ways.push_back(nothing());
  for (const auto& [c, longer] : below) {
    taken.push_back({c, c});
    ways.push_back(sequence({literal(escaped_character(c)), outside_of(longer, depth + 1, any)}));
  }
  const text::CodePointSet others = text::CodePointSet(std::move(taken)).inverted();
  ways.push_back(sequence({character(others), star(any)}));
  return choice(std::move(ways));
}

}  // namespace

JsonText::JsonText(Rules& rules) : rules_(rules) {
  space_ = rules.add(repeat(any_byte_of(" \t\n\r"), 0, kMostSpace));
  comma_ = rules.add(sequence({space_, literal(","), space_}));
  colon_ = rules.add(sequence({space_, literal(":"), space_}));
  const text::CodePointSet plain({{0x20, 0x21}, {0x23, 0x5B}, {0x5D, text::kLastCodePoint}});
  character_ = rules.add(
      choice({character(plain),
              sequence({literal("\\"), choice({any_byte_of("\"\\/bfnrt"), unicode_escape()})})}));
  string_ = rules.add(sequence({literal("\""), star(character_), literal("\"")}));
  const auto whole = sequence({bytes('1', '9'), json_digits(0, kJsonDigits - 1)});
  integer_ = rules.add(choice({literal("0"), sequence({optional(literal("-")), whole})}));
  number_ = rules.add(sequence(
      {optional(literal("-")), choice({literal("0"), whole}),
       optional(sequence({literal("."), json_digits(1, kJsonDigits)})),
       optional(sequence({any_byte_of("eE"), optional(any_byte_of("+-")), json_digits(1, 2)}))}));
  const auto value = rules.declare();
  value_ = Rules::use(value);
  const auto list_of = [&](const char* begin, const ExpressionPtr& item, const char* end) {
    return sequence({literal(begin), space_,
                     optional(sequence({item, star(sequence({comma_, item})), space_})),
                     literal(end)});
  };
  const auto member = rules.add(sequence({string_, colon_, value_}));
  rules.define(value, choice({list_of("{", member, "}"), list_of("[", value_, "]"), string_,
                              number_, literal("true"), literal("false"), literal("null")}));
}

ExpressionPtr JsonText::string_of_length(std::uint32_t min, std::uint32_t max) const {
  return sequence({literal("\""), repeat(character_, min, max), literal("\"")});
}

ExpressionPtr JsonText::key_except(const std::vector<std::string>& names) const {
  std::vector<std::u32string> all;
  for (const auto& name : names) all.push_back(text::to_code_points(name));
  const text::CodePointSet plain({{0x20, 0x21}, {0x23, 0x5B}, {0x5D, text::kLastCodePoint}});
  return rules_.add(
      sequence({literal("\""), outside_of(all, 0, rules_.add(character(plain))), literal("\"")}));
}

ExpressionPtr JsonText::member(ExpressionPtr key, ExpressionPtr value) const {
  return sequence({std::move(key), colon_, std::move(value)});
}

}  // namespace ferry::rollout::grammar
