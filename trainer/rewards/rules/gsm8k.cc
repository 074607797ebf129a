#include "trainer/rewards/rules/gsm8k.h"

#include <optional>

#include "trainer/rewards/rules/code_points.h"

namespace ferry::trainer::gsm8k {
namespace {

using code_points::decode;
using code_points::is_ascii_digit;
using code_points::last;
using code_points::replace;
using code_points::Text;
using code_points::View;

constexpr std::size_t kSolutionClipChars = 300;

bool is_part(char32_t c) {
  return is_ascii_digit(c) || c == U'.' || c == U',';
}

// \-?[0-9\.\,]+ at `at`; empty if it is not there.
View number_at(View text, std::size_t at) {
  auto end = at;
  if (end < text.size() && text[end] == U'-') ++end;
  const auto digits = end;
  while (end < text.size() && is_part(text[end])) ++end;
  return end == digits ? View() : text.substr(at, end - at);
}

std::optional<Text> strict(View text) {
  constexpr View kMark = U"#### ";
  std::optional<Text> answer;
  for (auto at = text.find(kMark); at != text.npos; at = text.find(kMark, at + 1)) {
    const auto number = number_at(text, at + kMark.size());
    if (!number.empty()) answer = replace(number, U",", U"");
  }
  return answer;
}

// The last that is more than a point; where there is none, the first.
std::optional<Text> flexible(View text) {
  std::optional<Text> answer;
  for (std::size_t at = 0; at < text.size();) {
    const auto number = number_at(text, at);
    if (!number.empty() && (!answer || number != U".")) answer = number;
    at += number.empty() ? 1 : number.size();
  }
  return answer;
}

}  // namespace

double compute_score(std::string_view solution_str,
                     std::string_view ground_truth,
                     const Options& options) {
  const auto solution = decode(solution_str);
  const auto end = last(solution, kSolutionClipChars);
  const auto answer = options.method == Method::kStrict ? strict(end) : flexible(end);
  if (!answer) return 0;
  return *answer == decode(ground_truth) ? options.score : options.format_score;
}

}  // namespace ferry::trainer::gsm8k
