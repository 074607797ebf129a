// The peer of tests/interop/rewards/test_rewards.py: reads a question in JSON from each line of
// standard input, and writes its answer to a line of standard output.
//
//   reward_tool rules
//     {"data_source", "solution_str", "ground_truth"} -> the score; with "method" that of gsm8k,
//     with "pattern" that of a form
//
//   reward_tool command PROGRAM SECONDS
//     lists of requests to the program, which may be silent for SECONDS -> lists of scores
#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "distckpt/base/error.h"
#include "trainer/rewards/reward_command.h"
#include "trainer/rewards/reward_score.h"
#include "trainer/rewards/rules/gsm8k.h"

namespace ferry::trainer {
namespace {

using nlohmann::json;

json to_json(const RewardScore& score) {
  json result{{"score", score.score}};
  for (const auto& [name, value] : score.numbers) result[name] = value;
  for (const auto& [name, value] : score.texts) result[name] = value;
  return result;
}

json rule(const json& q) {
  const std::string solution = q.at("solution_str");
  if (q.contains("pattern"))
    return FormatReward(q.at("pattern").get<std::string>()).compute_score(solution);
  const auto& given = q.at("ground_truth");
  const auto truth = given.is_string() ? given.get<std::string>() : given.dump();
  if (q.contains("method"))
    return gsm8k::compute_score(
        solution, truth,
        {.method = q.at("method") == "strict" ? gsm8k::Method::kStrict : gsm8k::Method::kFlexible,
         .format_score = 0.25,
         .score = 2});
  return to_json(default_compute_score(q.at("data_source").get<std::string>(), solution, truth));
}

json command(RewardCommand& program, const json& q) {
  std::vector<RewardRequest> requests;
  for (const auto& item : q)
    requests.push_back({.data_source = item.at("data_source"),
                        .solution_str = item.at("solution_str"),
                        .ground_truth = item.at("ground_truth").dump(),
                        .extra_info = item.value("extra_info", json::object()).dump()});
  auto scores = json::array();
  for (const auto& score : program.compute_score(requests)) scores.push_back(to_json(score));
  return {{"scores", scores}, {"restarts", program.num_restarts()}};
}

int run(const std::vector<std::string>& arguments) {
  std::function<json(const json&)> answer = rule;
  std::unique_ptr<RewardCommand> program;
  if (arguments.at(0) == "command") {
    const std::chrono::milliseconds timeout(
        static_cast<std::int64_t>(1000 * std::strtod(arguments.at(2).c_str(), nullptr)));
    program = std::make_unique<RewardCommand>(RewardCommandOptions{
        .command = arguments.at(1), .timeout = timeout, .start_timeout = 5 * timeout});
    answer = [&](const json& q) { return command(*program, q); };
  }
  for (std::string line; std::getline(std::cin, line);) {
    try {
      fmt::print("{}\n", answer(json::parse(line)).dump());
    } catch (const Error& error) {
      fmt::print("{}\n", json{{"error", error.report()}, {"kind", to_string(error.kind())}}.dump());
    }
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace ferry::trainer

int main(int argc, char** argv) {
  return ferry::trainer::run({argv + 1, argv + argc});
}
