// The part of a session between two turns of the model (verl's AgentLoopBase): whom it asks
// when the model has answered, and what is said to the model then. A loop does not wait: questions
// are asked, and their answers brought, by AgentRunner.
//
//   single turn   begin: nothing -> the model answers -> over
//   tools         the model answers -> its calls are questions -> a message of each answer
//   environment   begin: reset -> the model answers -> step -> a message, unless it is done
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "trainer/agents/agent_program.h"
#include "trainer/agents/session.h"

namespace ferry::trainer {

struct AgentQuestion {
  std::size_t program = 0;                // of the loop's programs()
  nlohmann::json body{};                  // an object
  std::optional<nlohmann::json> known{};  // the answer, where no program has to be asked
};

class AgentLoop {
 public:
  AgentLoop() = default;
  AgentLoop(const AgentLoop&) = delete;
  AgentLoop& operator=(const AgentLoop&) = delete;
  virtual ~AgentLoop() = default;

  virtual std::vector<AgentProgramOptions> programs() const = 0;

  // Whether the chat template shows tools to the model.
  virtual bool shows_tools() const { return false; }
  // Whether the text of a turn is without special tokens.
  virtual bool skips_special() const { return true; }

  // Asks what has to be known before the first turn, and takes the answers: messages of the session
  // that the prompt is made of anew. Returns whether there are such.
  virtual std::vector<AgentQuestion> begin(const Session&) const { return {}; }
  virtual bool begun(Session&, std::span<const nlohmann::json>) const { return false; }

  // The model has written `text`. Adds it to the messages; returns what is asked, or nothing: then
  // the session is over.
  virtual std::vector<AgentQuestion> turn_is_over(Session& session,
                                                  const std::string& text) const = 0;
  // Takes the answers to these, in their order. Returns how many messages it has added for the
  // model; none: the session is over.
  virtual std::size_t answered(Session& session, std::span<const nlohmann::json> answers) const = 0;

  // Whether a turn is worth asking about that none can follow.
  virtual bool scores_every_turn() const { return false; }
  // The session is over before its program has said so: what the program is told, if anything.
  virtual std::optional<nlohmann::json> cut_off(const Session&) const { return std::nullopt; }
};

}  // namespace ferry::trainer
