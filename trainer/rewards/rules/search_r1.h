// Questions as Search-R1 scores them: what stands in the last <answer>, compared with each target
// in lower case, without punctuation and articles (B. Jin et al., arXiv:2503.09516; verl
// utils/reward_score/search_r1_like_qa_em.py).
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace ferry::trainer::search_r1 {

// The answers that a ground truth names: {"target": "a"}, {"target": ["a", "b"]}, or the text of
// such an object. Throws Error(kCorrupt).
std::vector<std::string> targets_of(const nlohmann::ordered_json& ground_truth);

// 1 or 0; 0.25 where the right answer comes with more than ten opening or closing tags.
double compute_score(std::string_view solution_str, const std::vector<std::string>& targets);

}  // namespace ferry::trainer::search_r1
