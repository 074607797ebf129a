#include "trainer/rewards/rules/math_dapo.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "trainer/rewards/rules/code_points.h"

namespace ferry::trainer::math_dapo {
namespace {

using code_points::balanced_braces;
using code_points::decode;
using code_points::encode;
using code_points::is_digit;
using code_points::is_space;
using code_points::last;
using code_points::replace;
using code_points::split;
using code_points::strip;
using code_points::Text;
using code_points::View;

constexpr View kInvalid = U"[INVALID]";

constexpr std::array<std::pair<View, View>, 10> kSubstitutions{{
    {U"an ", U""},
    {U"a ", U""},
    {U".$", U"$"},
    {U"\\$", U""},
    {U"\\ ", U""},
    {U" ", U""},
    {U"mbox", U"text"},
    {U",\\text{and}", U","},
    {U"\\text{and}", U","},
    {U"\\text{m}", U"\\text{}"},
}};

constexpr std::array<View, 41> kRemovedExpressions{
    U"square",     U"ways",       U"integers",  U"dollars",      U"mph",
    U"inches",     U"hours",      U"km",        U"units",        U"\\ldots",
    U"sue",        U"points",     U"feet",      U"minutes",      U"digits",
    U"cents",      U"degrees",    U"cm",        U"gm",           U"pounds",
    U"meters",     U"meals",      U"edges",     U"students",     U"childrentickets",
    U"multiples",  U"\\text{s}",  U"\\text{.}", U"\\text{\ns}",  U"\\text{}^2",
    U"\\text{}^3", U"\\text{\n}", U"\\text{}",  U"\\mathrm{th}", U"^\\circ",
    U"^{\\circ}",  U"\\;",        U",\\!",      U"{,}",          U"\"",
    U"\\dots",
};

std::size_t line_end(View text, std::size_t at) {
  return std::min(text.find(U'\n', at), text.size());
}

// (.*?)(\$)(.*?)(\$)(.*) -> $\3$: of each line with two dollars what is between the first two.
Text keep_between_dollars(View text) {
  Text result;
  for (const auto line : split(text, U"\n")) {
    if (line.data() != text.data()) result += U'\n';
    const auto first = line.find(U'$');
    const auto second = first == line.npos ? first : line.find(U'$', first + 1);
    result += second == line.npos ? line : line.substr(first, second + 1 - first);
  }
  return result;
}

// (\\name\{)(.*?)(\}) -> \2, or with (.*) as much of the line as can be.
Text unwrap(View text, View opening, bool greedy) {
  Text result;
  for (std::size_t at = 0; at < text.size();) {
    if (text.substr(at).starts_with(opening)) {
      const auto begin = at + opening.size(), end = line_end(text, begin);
      const auto inside = text.substr(begin, end - begin);
      const auto brace = greedy ? inside.rfind(U'}') : inside.find(U'}');
      if (brace != inside.npos) {
        result += inside.substr(0, brace);
        at = begin + brace + 1;
        continue;
      }
    }
    result += text[at++];
  }
  return result;
}

// (frac)([^{])(.) -> frac{\2}{\3}; (sqrt)([^{]) -> sqrt{\2}
Text put_braces(View text, View command, std::size_t count) {
  Text result;
  for (std::size_t at = 0; at < text.size();) {
    const auto first = at + command.size();
    if (text.substr(at).starts_with(command) && first + count <= text.size() &&
        text[first] != U'{' && (count == 1 || text[first + 1] != U'\n')) {
      result += command;
      for (std::size_t i = 0; i < count; ++i) result += U"{" + Text(1, text[first + i]) + U"}";
      at = first + count;
    } else {
      result += text[at++];
    }
  }
  return result;
}

Text normalize_final_answer(View answer) {
  Text text(split(answer, U"=").back());
  for (const auto& [from, to] : kSubstitutions) text = replace(text, from, to);
  for (const auto expression : kRemovedExpressions) text = replace(text, expression, U"");
  text = keep_between_dollars(text);
  for (const View opening : {U"\\text{", U"\\textbf{", U"\\overline{"})
    text = unwrap(text, opening, false);
  text = unwrap(text, U"\\boxed{", true);
  text = put_braces(text, U"frac", 2);
  text = put_braces(text, U"sqrt", 1);
  text = replace(text, U"$", U"");
  const auto digits = replace(text, U",", U"");
  if (!digits.empty() && std::ranges::all_of(digits, is_digit)) text = digits;
  return Text(strip(text));
}

// (?i)Answer, where re folds the long s, too.
bool answer_at(View text, std::size_t at) {
  constexpr View kWord = U"answer";
  if (at + kWord.size() > text.size()) return false;
  for (std::size_t i = 0; i < kWord.size(); ++i) {
    const auto c = text[at + i];
    const bool same =
        c == kWord[i] || c == kWord[i] - U'a' + U'A' || (kWord[i] == U's' && c == U'ſ');
    if (!same) return false;
  }
  return true;
}

std::size_t skip_space(View text, std::size_t at) {
  while (at < text.size() && is_space(text[at])) ++at;
  return at;
}

// The last match of (?i)Answer\s*:\s*([^\n]+).
std::optional<View> last_answer(View text) {
  std::optional<View> answer;
  for (std::size_t at = 0; at < text.size(); ++at) {
    if (!answer_at(text, at)) continue;
    const auto colon = skip_space(text, at + 6);
    if (colon == text.size() || text[colon] != U':') continue;
    auto begin = skip_space(text, colon + 1);
    // Space that ends the text is given back until something of a line is there.
    if (begin == text.size()) {
      while (begin > colon + 1 && text[begin - 1] == U'\n') --begin;
      if (begin == colon + 1) continue;
      --begin;
    }
    answer = text.substr(begin, line_end(text, begin) - begin);
    at = begin + answer->size() - 1;
  }
  return answer;
}

std::optional<View> last_boxed(View text) {
  constexpr View kOpening = U"\\boxed{";
  const auto begin = text.rfind(kOpening);
  if (begin == text.npos) return std::nullopt;
  const auto found = balanced_braces(text, begin);
  if (found.empty()) return std::nullopt;
  return found.substr(kOpening.size(), found.size() - kOpening.size() - 1);
}

Score score_of(bool correct, View pred) {
  return {.score = correct ? 1.0 : -1.0, .acc = correct, .pred = encode(pred)};
}

}  // namespace

Score compute_score(std::string_view solution_str, std::string_view ground_truth) {
  const auto decoded = decode(solution_str), truth = decode(ground_truth);
  const auto solution = last(decoded, 300);
  const auto pred = normalize_final_answer(last_answer(solution).value_or(kInvalid));
  if (pred == kInvalid) {
    if (const auto boxed = last_boxed(last(solution, 100)))
      return score_of(*boxed == truth, *boxed);
  }
  return score_of(pred == normalize_final_answer(truth), pred);
}

}  // namespace ferry::trainer::math_dapo
