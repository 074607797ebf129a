// An answer of several turns, turn by turn: what the model wrote, and what tools or an environment
// said to it (docs/training/agents.md), out of the text of the answer and the run's journal of
// sessions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace ferry::cli {

struct Turn {
  std::string who{};   // "model", "calculator", "environment"
  std::string note{};  // of a call: its arguments; of an answer's reward: "reward 0.5"
  std::string text{};
};

// `exchanges`: {"question": {...}, "answer": {...}} in their order. `turns`: the member of a
// sample,
// [[whether by the model, text], ...]; the exchanges name those of others.
//
// Samples of one turn, and of runs that reject tokens, have none: then the text of a tool is looked
// for in the output, where one that was cut is not found, and stands before the turn that has it.
std::vector<Turn> turns_of(const std::string& output,
                           const nlohmann::json& exchanges,
                           const nlohmann::json& turns = {});

// The exchanges of each answer of a step, in their order; none unless the journal has as many
// sessions as there are answers.
std::vector<nlohmann::json> read_exchanges(const std::filesystem::path& sessions,
                                           std::int64_t step,
                                           std::size_t num_answers);

}  // namespace ferry::cli
