#include "trainer/rewards/rules/mathruler.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <initializer_list>
#include <iterator>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "trainer/rewards/rules/latex_text.h"
#include "trainer/rewards/rules/math_expression.h"
#include "trainer/rewards/rules/math_reward.h"

namespace ferry::trainer::mathruler {
namespace {

using code_points::balanced_braces;
using code_points::decode;
using code_points::encode;
using code_points::is_ascii_digit;
using code_points::is_letter;
using code_points::lower;
using code_points::replace;
using code_points::split;
using code_points::strip;
using code_points::Text;
using code_points::View;

// ^\\text\{(.+?)\}$ -> \1
View without_text(View text) {
  constexpr View kOpening = U"\\text{";
  auto inner = text;
  if (inner.ends_with(U'\n')) inner.remove_suffix(1);
  if (!inner.starts_with(kOpening) || !inner.ends_with(U'}')) return text;
  inner = inner.substr(kOpening.size(), inner.size() - kOpening.size() - 1);
  return inner.empty() || inner.find(U'\n') != inner.npos ? text : inner;
}

Text hendrycks(View answer) {
  const auto text = strip(without_text(strip(answer)));
  return math_reward::strip_string(text, /*percent=*/true).value_or(Text(text));
}

// float(text), of ASCII digits.
std::optional<double> to_float(View text) {
  std::string plain;
  for (const auto c : strip(text)) {
    if (c >= 0x80) return std::nullopt;
    plain += static_cast<char>(std::tolower(static_cast<int>(c)));
  }
  // 1_000 is 1000.
  for (auto at = plain.find('_'); at != plain.npos; at = plain.find('_', at)) {
    const auto digit = [&](std::size_t i) {
      return i < plain.size() && std::isdigit(static_cast<unsigned char>(plain[i])) != 0;
    };
    if (at == 0 || !digit(at - 1) || !digit(at + 1)) return std::nullopt;
    plain.erase(at, 1);
  }
  const bool has_plus = plain.starts_with('+');
  const auto* const begin = plain.data() + (has_plus ? 1 : 0);
  const auto* const end = plain.data() + plain.size();
  double value = 0;
  const auto read = std::from_chars(begin, end, value);
  const bool is_read = read.ec == std::errc() && read.ptr == end && begin != end;
  if (!is_read || (has_plus && *begin == '-') || plain.find('(') != plain.npos) return std::nullopt;
  return value;
}

bool is_int(double value) {
  return std::isfinite(value) && std::abs(value - std::nearbyint(value)) <= 1e-7;
}

// (\d)(,)(\d\d\d)($|\D) -> \1\3\4, until nothing changes.
Text without_commas(View text) {
  Text before, result(text);
  while (before != result) {
    before = std::move(result);
    result.clear();
    for (std::size_t at = 0; at < before.size();) {
      const View rest = View(before).substr(at);
      const bool matches = rest.size() >= 5 && is_ascii_digit(rest[0]) && rest[1] == U',' &&
                           std::ranges::all_of(rest.substr(2, 3), is_ascii_digit) &&
                           (rest.size() == 5 || !is_ascii_digit(rest[5]));
      if (!matches) {
        result += before[at++];
        continue;
      }
      result += rest[0];
      result += rest.substr(2, 4);
      at += std::min<std::size_t>(rest.size(), 6);
    }
  }
  return result;
}

bool str_is_int(View text) {
  const auto value = to_float(without_commas(text));
  return value && is_int(*value);
}

// {unit}(es)?(s)? *(\^[0-9]+)? -> nothing
Text without_unit(View text, View unit) {
  Text result;
  for (std::size_t at = 0; at < text.size();) {
    if (!text.substr(at).starts_with(unit)) {
      result += text[at++];
      continue;
    }
    at += unit.size();
    if (text.substr(at).starts_with(U"es")) at += 2;
    if (text.substr(at).starts_with(U's')) ++at;
    while (at < text.size() && text[at] == U' ') ++at;
    auto end = at + 1;
    while (end < text.size() && is_ascii_digit(text[end])) ++end;
    if (at < text.size() && text[at] == U'^' && end > at + 1) at = end;
  }
  return result;
}

// `from` with any number of spaces behind its first `size` characters -> `to`
Text replace_spaced(View text, View from, std::size_t size, View to) {
  Text result;
  for (std::size_t at = 0; at < text.size();) {
    auto end = at + size;
    if (text.substr(at).starts_with(from.substr(0, size))) {
      while (end < text.size() && text[end] == U' ') ++end;
      if (text.substr(end).starts_with(from.substr(size))) {
        result += to;
        at = end + from.size() - size;
        continue;
      }
    }
    result += text[at++];
  }
  return result;
}

// ([0-9]) +([0-9]) -> \1+\2: mixed numbers
Text with_sums(View text) {
  Text result;
  for (std::size_t at = 0; at < text.size();) {
    auto next = at + 1;
    while (is_ascii_digit(text[at]) && next < text.size() && text[next] == U' ') ++next;
    const bool matches = next > at + 1 && next < text.size() && is_ascii_digit(text[next]);
    result += text[at];
    if (matches) {
      result += U'+';
      result += text[next];
    }
    at = matches ? next + 1 : at + 1;
  }
  return result;
}

Text parse_latex(View text) {
  auto with_space = replace(replace(text, U"\\tfrac", U"\\frac"), U"\\dfrac", U"\\frac");
  with_space = replace(with_space, U"\\frac", U" \\frac");
  const auto plain = latex::to_text(with_space);
  if (!plain) return Text(text);
  auto result = replace(*plain, U"√", U"sqrt");
  result = replace(result, U"π", U"pi");
  result = replace(result, U"∞", U"inf");
  result = replace(result, U"∪", U"U");
  result = replace(result, U"·", U"*");
  result = replace(result, U"×", U"*");
  return Text(strip(result));
}

Text int_text(double value) {
  return decode(fmt::format("{:.0f}", value == 0 ? 0 : value));
}

constexpr View kUnits[] = {U"degree", U"cm",   U"centimeter", U"meter", U"mile",  U"second",
                           U"minute", U"hour", U"day",        U"week",  U"month", U"year",
                           U"foot",   U"feet", U"inch",       U"yard"};

Text normalize(View original) {
  Text text(without_text(original));
  for (const auto& [from, to] :
       std::initializer_list<std::pair<View, View>>{{U"\\%", U"%"},
                                                    {U"\\$", U"$"},
                                                    {U"$", U""},
                                                    {U"%", U""},
                                                    {U" or ", U" , "},
                                                    {U" and ", U" , "},
                                                    {U"million", U"*10^6"},
                                                    {U"billion", U"*10^9"},
                                                    {U"trillion", U"*10^12"}})
    text = replace(text, from, to);
  for (const auto unit : kUnits) text = without_unit(text, unit);
  text = replace_spaced(text, U"^\\circ", 1, U"");
  if (text.starts_with(U'{') && text.ends_with(U'}')) text = text.substr(1, text.size() - 2);
  text = replace_spaced(text, U",\\!", 3, U"");
  if (const auto value = to_float(text); value && is_int(*value))
    text = int_text(std::nearbyint(*value));
  if (text.find(U'\\') != text.npos) text = parse_latex(text);
  text = with_sums(replace_spaced(text, U"-", 1, U"-"));
  for (const View character : {U" ", U"{", U"}"}) text = replace(text, character, U"");
  text = lower(text);
  if (str_is_int(text)) text = int_text(std::trunc(to_float(replace(text, U",", U"")).value_or(0)));
  return text;
}

// ^-?[0-9]+.?/0*[1-9][0-9]*.?$
bool is_fraction(View text) {
  if (text.ends_with(U'\n')) text.remove_suffix(1);
  if (text.starts_with(U'-')) text.remove_prefix(1);
  const auto slash = text.find(U'/');
  if (slash == text.npos || text.find(U'\n') != text.npos) return false;
  const auto is_number = [](View digits) {
    return !digits.empty() && std::ranges::all_of(digits, is_ascii_digit);
  };
  const auto is_above = [&](View digits) {
    return is_number(digits) || (!digits.empty() && is_number(digits.substr(0, digits.size() - 1)));
  };
  const auto below = text.substr(slash + 1);
  const auto above = text.substr(0, slash);
  const auto some = std::ranges::any_of(below.substr(0, below.find_first_not_of(U"0123456789")),
                                        [](char32_t c) { return c != U'0'; });
  return is_above(above) && is_above(below) && some;
}

std::vector<Text> split_tuple(View original) {
  constexpr View kBrackets = U"()[]";
  const auto text = without_commas(original);
  if (text.empty()) return {};
  const auto inner = text.size() > 2 ? View(text).substr(1, text.size() - 2) : View();
  const bool is_tuple = !inner.empty() && kBrackets.find(text.front()) != View::npos &&
                        kBrackets.find(text.back()) != View::npos &&
                        inner.find_first_of(kBrackets) == View::npos;
  if (!is_tuple) return {text};
  std::vector<Text> elements;
  for (const auto element : split(inner, U",")) elements.emplace_back(strip(element));
  return elements;
}

// Text is no expression if it has more than two letters or powers that could take long.
bool should_allow_eval(View text) {
  Text letters;
  for (const auto c : replace(replace(text, U"sqrt", U""), U"frac", U""))
    if (is_letter(c) && letters.find(c) == letters.npos) letters += c;
  if (letters.size() > 2) return false;
  for (auto at = text.find(U'^'); at != text.npos; at = text.find(U'^', at + 1)) {
    auto end = at + 1;
    while (end < text.size() && is_ascii_digit(text[end])) ++end;
    const auto next = end < text.size() ? text[end] : U' ';
    const auto digits = end - at - 1;
    if (digits > 1 || (digits == 1 && next == U'^')) return false;
    if (digits == 0 && (next == U'{' || next == U'(')) return false;
  }
  return true;
}

// The length of the name at the beginning.
std::size_t name_size(View text) {
  std::size_t size = 0;
  while (size < text.size() && text[size] >= U'a' && text[size] <= U'z') ++size;
  return size;
}

// A name as math_value() reads it; nothing for functions other than roots, and for words of Python.
std::optional<std::string> name_for_value(View name, bool is_called) {
  constexpr View kOthers[] = {U"ln", U"re", U"im", U"li", U"ff", U"rf",
                              U"if", U"in", U"is", U"or", U"as"};
  if (name == U"sqrt") return is_called ? std::optional<std::string>("\\sqrt") : std::nullopt;
  if (std::ranges::find(kOthers, name) != std::end(kOthers)) return std::nullopt;
  if (name == U"pi") return "\\pi ";
  std::string letters;
  for (const auto c : name)
    letters += c == U'e' ? "\\epsilon " : c == U'i' ? "\\iota " : encode(Text(1, c));
  return letters;
}

// False for numbers of Python that are none of people's: 012, 0x1, 2j, and for 2e3.
bool is_plain_number(View number, View behind) {
  const bool begins_with_zero = number.size() > 1 && number[0] == U'0';
  if (begins_with_zero && number.find(U'.') == number.npos &&
      number.find_first_not_of(U'0') != number.npos)
    return false;
  const auto next = behind.empty() ? U' ' : behind[0];
  const auto digits = behind.substr(std::min(behind.size(), behind.find_first_not_of(U"e+-")));
  const bool is_power = next == U'e' && !digits.empty() && is_ascii_digit(digits[0]);
  return next != U'j' && !is_power &&
         !(number == U"0" && (next == U'x' || next == U'b' || next == U'o'));
}

// True if sympy never finds the two equal unless they are written alike: a decimal is no root.
bool is_decimal_beside_root(View left, View right) {
  const auto has_root = [](View text) {
    return text.find(U"sqrt") != text.npos || text.find(U"pi") != text.npos;
  };
  const auto has_decimal_power = [](View text) {
    for (auto at = text.find(U'^'); at != text.npos; at = text.find(U'^', at + 1)) {
      auto end = at + 1;
      while (end < text.size() && is_ascii_digit(text[end])) ++end;
      if (end < text.size() && text[end] == U'.') return true;
    }
    return false;
  };
  const bool has_decimal = left.find(U'.') != left.npos || right.find(U'.') != right.npos;
  return has_decimal &&
         (has_root(left) != has_root(right) || has_decimal_power(left) || has_decimal_power(right));
}

// Expressions as Python reads them, for math_value().
std::optional<std::string> for_value(View text) {
  std::string result;
  for (std::size_t at = 0; at < text.size();) {
    const auto rest = text.substr(at);
    if (const auto size = name_size(rest); size > 0) {
      const auto name = name_for_value(rest.substr(0, size), rest.substr(size).starts_with(U'('));
      if (!name) return std::nullopt;
      result += *name;
      at += size;
      continue;
    }
    auto end = at;
    while (end < text.size() && (is_ascii_digit(text[end]) || text[end] == U'.')) ++end;
    const auto number = text.substr(at, end - at);
    if (!number.empty() && !is_plain_number(number, text.substr(end))) return std::nullopt;
    if (!number.empty()) {
      result += encode(number);
      at = end;
      continue;
    }
    const auto c = rest[0], behind = rest.size() > 1 ? rest[1] : U' ';
    if (View(U"+-*/^()!").find(c) == View::npos) return std::nullopt;
    if ((c == U')' && is_ascii_digit(behind)) || (c == U'!' && behind == U'!')) return std::nullopt;
    result += static_cast<char>(c);
    ++at;
  }
  return result;
}

bool are_equal(View truth, View given) {
  constexpr int kPoints = 3;
  constexpr double kTolerance = 1e-13;
  if (!should_allow_eval(U"(" + Text(truth) + U")-(" + Text(given) + U")")) return false;
  if (is_decimal_beside_root(truth, given)) return false;
  const auto left = for_value(truth), right = for_value(given);
  if (!left || !right) return false;
  for (int point = 0; point < kPoints; ++point) {
    const auto a = math_value(*left, point), b = math_value(*right, point);
    if (!a || !b || std::abs(*a - *b) > kTolerance * std::max(std::abs(*a), std::abs(*b)))
      return false;
  }
  return true;
}

}  // namespace

bool grade_answer(View answer, View ground_truth) {
  if (hendrycks(ground_truth) == hendrycks(answer)) return true;
  const auto truth = normalize(ground_truth), given = normalize(answer);
  if (truth == given) return true;
  if (given.empty()) return false;
  const auto wanted = split_tuple(truth), found = split_tuple(given);
  if (wanted.size() != found.size()) return false;
  if (wanted.size() > 1 && (truth.front() != given.front() || truth.back() != given.back()))
    return false;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    if (is_fraction(wanted[i]) && is_fraction(found[i])) {
      if (wanted[i] != found[i]) return false;  // reduced fractions alone are right
    } else if (str_is_int(wanted[i]) != str_is_int(found[i]) || !are_equal(wanted[i], found[i])) {
      return false;
    }
  }
  return true;
}

Text extract_boxed_content(View text) {
  constexpr View kOpening = U"\\boxed{";
  const auto begin = text.rfind(kOpening);
  const auto box = begin == text.npos ? View() : balanced_braces(text, begin);
  if (box.empty()) return U"None";
  return Text(strip(box.substr(kOpening.size(), box.size() - kOpening.size() - 1)));
}

}  // namespace ferry::trainer::mathruler
