// An answer of several turns while it comes about. It is token ids: what the model has written is
// never encoded again, what others say is appended.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "distckpt/base/error.h"
#include "rollout/request_output.h"
#include "trainer/config/agent_sections.h"
#include "trainer/data/examples.h"

namespace ferry::trainer {

struct ProgramRequest;  // program_agent_loop.h

struct Session {
  std::uint64_t seed = 0;  // of its draws; programs know the session by it
  AgentLoopKind loop = AgentLoopKind::kSingleTurn;
  Messages messages{};                 // the conversation so far
  nlohmann::json task{};               // of the record: data_source, ground_truth, extra_info
  std::vector<std::int64_t> prompt{};  // token ids
  std::string images{};                // of the prompt (PromptEncoder::visual_prompt())
  // Tokens of the model and of others; these have a log-probability of 0, among themselves alone.
  std::vector<rollout::TokenOutput> response{};
  std::vector<std::uint8_t> response_mask{};  // 1: by the model
  std::vector<std::int64_t> global_steps{};   // behind which the weights are that drew a token
  // Routes of all tokens but the last, if the engine returns them.
  std::vector<std::byte> routed_experts{};
  // The earnings of turns: the place in `response` of a turn's last token, and how much.
  std::vector<std::pair<std::size_t, double>> turn_scores{};
  nlohmann::json extra_info = nlohmann::json::object();  // results of programs, for the reward
  nlohmann::json replay{};  // of a run that is played again: its line of the journal, or null
  nlohmann::json exchanges = nlohmann::json::array();  // questions to programs, their answers
  // The request of program_agent that the model answers. Null: it is read from `exchanges`.
  std::shared_ptr<const ProgramRequest> request{};
  std::size_t turn_begin = 0;  // in `response`: of the turn that the model writes, or wrote last
  bool turn_stopped = false;   // that turn ended by itself, when a program was asked about it
  int assistant_turns = 0;
  int user_turns = 0;
  bool has_begun = false;
  bool is_over = false;

  // True if float32, which all are computed in, holds this reward with all that were earned.
  bool may_earn(double reward) const {
    auto all = std::abs(reward);
    for (const auto& [place, score] : turn_scores) all += std::abs(score);
    return all <= std::numeric_limits<float>::max();
  }
  // A turn has earned this, whose last token is at `place`. Throws Error(kCorrupt) if it may not.
  void earn(std::size_t place, double reward) {
    require(may_earn(reward), ErrorKind::kCorrupt, "session {}: a reward of {} is too large", seed,
            reward);
    turn_scores.emplace_back(place, reward);
  }

  // True for the answer of a program that took too long: the session is over with the turns that it
  // has, and nobody rewards it.
  bool times_out(const nlohmann::json& answer) {
    const bool times_out = assistant_turns > 0 && answer.contains("timed_out");
    if (times_out) extra_info["timed_out"] = 1;
    return times_out;
  }

  // All tokens before the turn that the model writes, or wrote last.
  std::vector<std::int64_t> tokens_before_turn() const {
    auto tokens = prompt;
    for (std::size_t i = 0; i < turn_begin; ++i) tokens.push_back(response[i].token_id);
    return tokens;
  }

  // verl's count: the prompt is a turn, too.
  int num_turns() const { return assistant_turns + user_turns + 1; }
};

}  // namespace ferry::trainer
