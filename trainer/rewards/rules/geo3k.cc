#include "trainer/rewards/rules/geo3k.h"

#include "trainer/rewards/rules/mathruler.h"

namespace ferry::trainer::geo3k {
namespace {

// <think>.*</think>.*\\boxed\{.*\}.* is the whole, with lines.
bool has_form(std::string_view text) {
  constexpr std::string_view kParts[] = {"<think>", "</think>", "\\boxed{", "}"};
  if (!text.starts_with(kParts[0])) return false;
  for (const auto part : kParts) {
    const auto at = text.find(part);
    if (at == text.npos) return false;
    text.remove_prefix(at + part.size());
  }
  return true;
}

}  // namespace

double compute_score(std::string_view solution_str, std::string_view ground_truth) {
  constexpr double kFormatScore = 0.1;
  const auto answer = mathruler::extract_boxed_content(code_points::decode(solution_str));
  const bool right = mathruler::grade_answer(answer, code_points::decode(ground_truth));
  return (1 - kFormatScore) * (right ? 1 : 0) + kFormatScore * (has_form(solution_str) ? 1 : 0);
}

}  // namespace ferry::trainer::geo3k
