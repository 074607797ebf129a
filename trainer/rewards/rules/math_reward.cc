#include "trainer/rewards/rules/math_reward.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "trainer/rewards/rules/code_points.h"

// Nothing, here, is where the original raises: then is_equiv compares what was not normalised.
namespace ferry::trainer::math_reward {
namespace {

using code_points::balanced_braces;
using code_points::decode;
using code_points::is_ascii_digit;
using code_points::replace;
using code_points::split;
using code_points::Text;
using code_points::View;

std::optional<Text> last_boxed_only_string(View text) {
  constexpr View kSpaced = U"\\boxed ";
  if (text.find(kSpaced) != text.npos)
    return Text(kSpaced) + Text(split(split(text, kSpaced).back(), U"$").front());
  auto begin = text.rfind(U"\\boxed");
  if (begin == text.npos) begin = text.rfind(U"\\fbox");
  if (begin == text.npos) return std::nullopt;
  const auto found = balanced_braces(text, begin);
  return found.empty() ? std::nullopt : std::optional<Text>(found);
}

std::optional<Text> remove_boxed(View text) {
  constexpr View kSpaced = U"\\boxed ", kBrace = U"\\boxed{";
  if (text.find(kSpaced) != text.npos)
    return text.starts_with(kSpaced) ? std::optional<Text>(text.substr(kSpaced.size()))
                                     : std::nullopt;
  if (!text.starts_with(kBrace) || !text.ends_with(U'}')) return std::nullopt;
  return Text(text.substr(kBrace.size(), text.size() - kBrace.size() - 1));
}

// \frac12 -> \frac{1}{2}, \frac1{72} -> \frac{1}{72}
std::optional<Text> fix_fracs(View text) {
  const auto parts = split(text, U"\\frac");
  Text result(parts[0]);
  for (std::size_t i = 1; i < parts.size(); ++i) {
    const auto part = parts[i];
    if (part.empty()) return std::nullopt;
    result += U"\\frac";
    if (part[0] == U'{') {
      result += part;
      continue;
    }
    if (part.size() < 2) return Text(text);
    result += U"{" + Text(1, part[0]) + U"}";
    if (part[1] == U'{')
      result += part.substr(1);
    else
      result += U"{" + Text(1, part[1]) + U"}" + Text(part.substr(2));
  }
  return result;
}

// True if Python prints an int so.
bool is_plain_integer(View text) {
  constexpr std::size_t kLongest = 4300;  // digits that int() reads
  if (text == U"0") return true;
  if (text.starts_with(U'-')) text.remove_prefix(1);
  return !text.empty() && text.size() <= kLongest && text[0] != U'0' &&
         std::ranges::all_of(text, is_ascii_digit);
}

// 1/2 -> \frac{1}{2}
Text fix_a_slash_b(View text) {
  const auto parts = split(text, U"/");
  if (parts.size() != 2 || !is_plain_integer(parts[0]) || !is_plain_integer(parts[1]))
    return Text(text);
  return U"\\frac{" + Text(parts[0]) + U"}{" + Text(parts[1]) + U"}";
}

// \sqrt3 -> \sqrt{3}
std::optional<Text> fix_sqrt(View text) {
  const auto parts = split(text, U"\\sqrt");
  Text result(parts[0]);
  for (std::size_t i = 1; i < parts.size(); ++i) {
    const auto part = parts[i];
    if (part.empty()) return std::nullopt;
    result += U"\\sqrt";
    if (part[0] == U'{')
      result += part;
    else
      result += U"{" + Text(1, part[0]) + U"}" + Text(part.substr(1));
  }
  return result;
}

constexpr std::array<std::pair<View, View>, 10> kReplacements{{
    {U"\n", U""},
    {U"\\!", U""},
    {U"\\\\", U"\\"},
    {U"tfrac", U"frac"},
    {U"dfrac", U"frac"},
    {U"\\left", U""},
    {U"\\right", U""},
    {U"^{\\circ}", U""},
    {U"^\\circ", U""},
    {U"\\$", U""},
}};

bool is_equiv(View left, View right) {
  const auto a = strip_string(left), b = strip_string(right);
  return a && b ? *a == *b : left == right;
}

}  // namespace

std::optional<Text> strip_string(View original, bool percent) {
  Text text(original);
  for (const auto& [from, to] : kReplacements) text = replace(text, from, to);
  const auto units = split(text, U"\\text{ ");  // units stand on the right
  if (units.size() > 2) return std::nullopt;
  text = Text(units[0]);
  if (!percent) text = replace(text, U"\\\\%", U"");
  text = replace(text, U"\\%", U"");
  if (percent) text = replace(text, U"%", U"");
  text = replace(text, U" .", U" 0.");
  text = replace(text, U"{.", U"{0.");
  if (text.empty()) return text;
  if (text[0] == U'.') text = U"0" + text;
  const auto sides = split(text, U"=");  // "k = 3"
  if (sides.size() == 2 && sides[0].size() <= 2) text = Text(sides[1]);
  const auto roots = fix_sqrt(text);
  if (!roots) return std::nullopt;
  const auto fractions = fix_fracs(replace(*roots, U" ", U""));
  if (!fractions) return std::nullopt;
  return fix_a_slash_b(*fractions == U"0.5" ? View(U"\\frac{1}{2}") : View(*fractions));
}

double compute_score(std::string_view solution_str, std::string_view ground_truth) {
  const auto boxed = last_boxed_only_string(decode(solution_str));
  if (!boxed) return 0;
  const auto answer = remove_boxed(*boxed);
  return answer && is_equiv(*answer, decode(ground_truth)) ? 1 : 0;
}

}  // namespace ferry::trainer::math_reward
