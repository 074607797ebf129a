#include "trainer/rewards/rules/search_r1.h"

#include <algorithm>
#include <optional>

#include "distckpt/base/error.h"
#include "distckpt/base/json.h"
#include "trainer/rewards/rules/code_points.h"

namespace ferry::trainer::search_r1 {
namespace {

using code_points::decode;
using code_points::is_ascii_punctuation;
using code_points::is_word;
using code_points::join_words;
using code_points::lower;
using code_points::split;
using code_points::strip;
using code_points::Text;
using code_points::View;

constexpr View kOpening = U"<answer>", kClosing = U"</answer>";
constexpr std::size_t kMostTags = 10;

// The last match of <answer>(.*?)</answer>, of those that follow each other.
std::optional<View> last_answer(View text) {
  std::optional<View> answer;
  for (std::size_t at = 0;;) {
    const auto opening = text.find(kOpening, at);
    if (opening == text.npos) break;
    const auto begin = opening + kOpening.size(), end = text.find(kClosing, begin);
    if (end == text.npos) break;
    answer = strip(text.substr(begin, end - begin));
    at = end + kClosing.size();
  }
  return answer;
}

std::size_t count(View text, View tag) {
  return split(text, tag).size() - 1;
}

bool is_article(View word) {
  return word == U"a" || word == U"an" || word == U"the";
}

// Words with one space between them, as re finds words.
Text normalize_answer(View answer) {
  auto text = lower(answer);
  std::erase_if(text, is_ascii_punctuation);
  Text result;
  for (std::size_t at = 0; at < text.size();) {
    auto end = at;
    while (end < text.size() && is_word(text[end])) ++end;
    const auto word = View(text).substr(at, end - at);
    result += is_article(word) ? View(U" ") : word;
    while (end < text.size() && !is_word(text[end])) result += text[end++];
    at = end;
  }
  return join_words(result);
}

}  // namespace

std::vector<std::string> targets_of(const nlohmann::ordered_json& ground_truth) {
  const auto truth = ground_truth.is_string()
                         ? distckpt::json_or_discarded(ground_truth.get<std::string>())
                         : nlohmann::json(ground_truth);
  const auto found = truth.is_object() ? truth.value("target", nlohmann::json()) : nlohmann::json();
  const auto targets = found.is_string() ? nlohmann::json::array({found}) : found;
  require(targets.is_array() &&
              std::ranges::all_of(targets, [](const auto& one) { return one.is_string(); }),
          ErrorKind::kCorrupt,
          "reward_model.ground_truth: names no answers, {{\"target\": [\"...\"]}}");
  return targets.get<std::vector<std::string>>();
}

double compute_score(std::string_view solution_str, const std::vector<std::string>& targets) {
  const auto solution = decode(solution_str);
  const auto answer = last_answer(solution);
  if (!answer) return 0;
  const auto normalized = normalize_answer(*answer);
  const bool correct = std::ranges::any_of(targets, [&](const std::string& target) {
    return normalize_answer(decode(target)) == normalized;
  });
  if (!correct) return 0;
  return std::max(count(solution, kOpening), count(solution, kClosing)) > kMostTags ? 0.25 : 1;
}

}  // namespace ferry::trainer::search_r1
