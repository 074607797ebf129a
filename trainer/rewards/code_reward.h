// The worth of a program that an answer contains, by tests that it is run on (verl
// reward_score/prime_code): codecontests, apps, codeforces, taco.
//
//   ground_truth  {"inputs": ["2 3\n", ...], "outputs": ["5\n", ...]}: what it reads, what it
//   prints
//                 with "fn_name": "add": lines of JSON, the arguments of that function or method of
//                 class Solution; JSON, what it returns
//   score         1 if it passes all tests, else its part of the first ten
#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

#include "trainer/rewards/reward_score.h"

namespace ferry::trainer {

struct CodeRewardOptions {
  // A program that runs the one that is named behind it, in bounds: {"ferry", "sandbox", ...,
  // "--"}.
  std::vector<std::string> sandbox{};
  std::chrono::milliseconds timeout = std::chrono::seconds(10);  // of a test
};

// Throws Error(kUsage) if the program above makes no sandbox; it has then said why on standard
// error.
void require_sandbox(const std::vector<std::string>& sandbox);

// The last block of ```python, or the whole. Throws Error(kCorrupt) for a ground truth that is no
// tests, Error(kUsage) where there is no sandbox.
RewardScore code_reward(std::string_view solution_str,
                        std::string_view ground_truth,
                        const CodeRewardOptions& options);

}  // namespace ferry::trainer
