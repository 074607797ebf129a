#include "trainer/rewards/rules/code_points.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <initializer_list>
#include <utility>

#include "rollout/text/unicode/unicode.h"

namespace ferry::trainer::code_points {
namespace {

// Digits that are none of a decimal system: superscripts, in circles (Numeric_Type=Digit).
constexpr std::array<std::pair<char32_t, char32_t>, 20> kOtherDigits{{
    {0xB2, 0xB3},       {0xB9, 0xB9},       {0x1369, 0x1371},   {0x19DA, 0x19DA},
    {0x2070, 0x2070},   {0x2074, 0x2079},   {0x2080, 0x2089},   {0x2460, 0x2468},
    {0x2474, 0x247C},   {0x2488, 0x2490},   {0x24EA, 0x24EA},   {0x24F5, 0x24FD},
    {0x24FF, 0x24FF},   {0x2776, 0x277E},   {0x2780, 0x2788},   {0x278A, 0x2792},
    {0x10A40, 0x10A43}, {0x10E60, 0x10E68}, {0x11052, 0x1105A}, {0x1F100, 0x1F10A},
}};

using Sets = std::vector<const rollout::text::CodePointSet*>;

Sets sets_named(std::initializer_list<std::string_view> names) {
  Sets sets;
  for (const auto name : names) sets.push_back(rollout::text::CodePointSet::named(name));
  return sets;
}

bool is_in(const Sets& sets, char32_t c) {
  return std::ranges::any_of(sets, [&](const auto* set) { return set->contains(c); });
}

// True if the sigma at `at` ends a word: a letter that has a case comes before it and none behind,
// whatever lies between that belongs to words (Unicode's Final_Sigma).
bool is_final_sigma(View text, std::size_t at) {
  constexpr View kWithin = U"'.:^`·՟״‘’․‧︓﹒﹕＇．：";
  static const auto cased = sets_named({"Lu", "Ll", "Lt"});
  static const auto ignored = sets_named({"Mn", "Me", "Cf", "Lm", "Sk"});
  const auto is_within = [&](char32_t c) {
    return kWithin.find(c) != View::npos || is_in(ignored, c);
  };
  auto before = at, behind = at + 1;
  while (before > 0 && is_within(text[before - 1])) --before;
  while (behind < text.size() && is_within(text[behind])) ++behind;
  return before > 0 && is_in(cased, text[before - 1]) &&
         (behind == text.size() || !is_in(cased, text[behind]));
}

}  // namespace

Text decode(std::string_view utf8) {
  return rollout::text::to_code_points(rollout::text::replace_invalid_utf8(utf8));
}

std::string encode(View text) {
  std::string utf8;
  for (const auto c : text) rollout::text::append_utf8(c, utf8);
  return utf8;
}

Text replace(View text, View from, View to) {
  Text result;
  for (std::size_t at = 0;;) {
    const auto found = text.find(from, at);
    result += text.substr(at, found - at);
    if (found == text.npos) return result;
    result += to;
    at = found + from.size();
  }
}

std::vector<View> split(View text, View separator) {
  std::vector<View> parts;
  for (std::size_t at = 0;;) {
    const auto found = text.find(separator, at);
    parts.push_back(text.substr(at, found - at));
    if (found == text.npos) return parts;
    at = found + separator.size();
  }
}

bool is_space(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 ||
         c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
         c == 0x205F || c == 0x3000;
}

bool is_digit(char32_t c) {
  if (c < 0x80) return is_ascii_digit(c);
  static const auto* const decimal = rollout::text::CodePointSet::named("Nd");
  return decimal->contains(c) || std::ranges::any_of(kOtherDigits, [&](const auto& range) {
           return range.first <= c && c <= range.second;
         });
}

bool is_letter(char32_t c) {
  static const auto* const letters = rollout::text::CodePointSet::named("L");
  return letters->contains(c);
}

bool is_word(char32_t c) {
  static const auto* const numbers = rollout::text::CodePointSet::named("N");
  return c == U'_' || is_letter(c) || numbers->contains(c);
}

bool is_ascii_punctuation(char32_t c) {
  return c < 0x80 && std::ispunct(static_cast<int>(c)) != 0;
}

Text lower(View text) {
  Text result;
  for (std::size_t at = 0; at < text.size(); ++at) {
    if (text[at] == U'Σ' && is_final_sigma(text, at))
      result += U'ς';
    else
      result += decode(rollout::text::lowercase(encode(text.substr(at, 1))));
  }
  return result;
}

Text join_words(View text) {
  Text result;
  for (std::size_t at = 0; at < text.size(); ++at) {
    if (is_space(text[at])) continue;
    const bool begins = at == 0 || is_space(text[at - 1]);
    if (begins && !result.empty()) result += U' ';
    result += text[at];
  }
  return result;
}

View strip(View text) {
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  return text;
}

View last(View text, std::size_t count) {
  return text.size() > count ? text.substr(text.size() - count) : text;
}

View balanced_braces(View text, std::size_t begin) {
  std::int64_t open = 0;
  for (auto i = begin; i < text.size(); ++i) {
    if (text[i] == U'{') ++open;
    if (text[i] == U'}' && --open == 0) return text.substr(begin, i + 1 - begin);
  }
  return {};
}

}  // namespace ferry::trainer::code_points
