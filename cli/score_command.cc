#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "cli/commands.h"
#include "distckpt/base/error.h"
#include "distckpt/base/json.h"
#include "trainer/rewards/code_reward.h"
#include "trainer/rewards/reward_score.h"

namespace ferry::cli {
namespace {

using nlohmann::json;

std::string text_of(const json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

// `code`: nothing if rules alone score.
json answer_to(const std::string& line, const std::optional<trainer::CodeRewardOptions>& code) {
  const auto question = distckpt::parse_json(line, "a question");
  json answer{{"id", distckpt::json_at(question, "id", "a question")}};
  try {
    const auto source = distckpt::json_string_at(question, "data_source", "a question");
    const auto solution = distckpt::json_string_at(question, "solution_str", "a question");
    const auto truth = text_of(distckpt::json_at(question, "ground_truth", "a question"));
    const auto score = code && trainer::is_code(source)
                           ? trainer::code_reward(solution, truth, *code)
                           : trainer::default_compute_score(source, solution, truth);
    answer["score"] = score.score;
    for (const auto& [name, value] : score.numbers) answer[name] = value;
    for (const auto& [name, value] : score.texts) answer[name] = value;
  } catch (const Error& error) {
    answer["error"] = error.what();
  }
  return answer;
}

}  // namespace

void add_score(CLI::App& app) {
  struct Flags {
    std::string memory = "1GiB";
    int seconds = 10;
    bool rules = false;
  };
  auto flags = std::make_shared<Flags>();
  auto* command = app.add_subcommand(
      "score", "Score answers by rules and tests, each line a question: a program of rewards");
  command->add_option("--seconds", flags->seconds, "Of a test of code. Default: 10")
      ->check(CLI::PositiveNumber);
  command->add_option("--memory", flags->memory,
                      "Address space of code that is tested. Default: 1GiB");
  command->add_flag("--rules", flags->rules, "Test no code: no sandbox is needed");
  command->footer(
      "reward_model.command='ferry score' asks it. Code is tested in a sandbox.\n"
      "Exit status: 0 at the end of its input, 2 trouble, such as a system without sandboxes.");
  command->callback([command, flags] {
    require_effective(*command, {{.here = flags->rules,
                                  .options = {"--seconds", "--memory"},
                                  .why = "--rules tests no code"}});
    const auto self = std::filesystem::read_symlink("/proc/self/exe").string();
    const auto memory = std::to_string(parse_size(flags->memory, "--memory"));
    const auto seconds = std::to_string(flags->seconds);
    std::optional<trainer::CodeRewardOptions> code;
    if (!flags->rules) {
      code = trainer::CodeRewardOptions{
          .sandbox = {self, "sandbox", "--memory", memory, "--cpu-seconds", seconds, "--"},
          .timeout = std::chrono::seconds(flags->seconds)};
      trainer::require_sandbox(code->sandbox);
    }
    for (std::string line; std::getline(std::cin, line);) {
      fmt::print("{}\n", answer_to(line, code).dump(-1, ' ', true, json::error_handler_t::replace));
      std::fflush(stdout);
    }
  });
}

}  // namespace ferry::cli
