// GSM8K: the number behind the last "#### " (verl utils/reward_score/gsm8k.py).
#pragma once

#include <cstdint>
#include <string_view>

namespace ferry::trainer::gsm8k {

enum class Method : std::uint8_t {
  kStrict,    // behind the last "#### ", without commas
  kFlexible,  // the last number, as it stands
};

struct Options {
  Method method = Method::kStrict;
  double format_score = 0;  // of a number that is not the right one
  double score = 1;
};

// Only the last 300 characters are read; without a number 0.
double compute_score(std::string_view solution_str,
                     std::string_view ground_truth,
                     const Options& options = {});

}  // namespace ferry::trainer::gsm8k
