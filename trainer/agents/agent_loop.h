// The part of a session between two turns of the model (verl's AgentLoopBase): whom it asks
// when the model has answered, and what is said to the model then. A loop does not wait: questions
// are asked, and their answers brought, by AgentRunner.
//
//   single turn   begin: nothing -> the model answers -> over
//   tools         the model answers -> its calls are questions -> a message of each answer
//   environment   begin: reset -> the model answers -> step -> a message, unless it is done
//   program       begin: run -> its request is the prompt -> the model answers -> the answer -> its
//                 next request is the message, or it ends
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
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
  nlohmann::json body{};                  // an object, which the journal has
  nlohmann::json details{};               // null, or what else the program is told
  std::optional<nlohmann::json> known{};  // the answer, where no program has to be asked
};

// The way on of a session whose questions are answered; with none of these it is over, or, before
// the first turn, its prompt is that of the record.
struct AgentReply {
  std::size_t num_messages = 0;            // the last ones of the session, for the model
  std::vector<std::int64_t> tokens{};      // instead: for the model, as they are
  std::vector<AgentQuestion> questions{};  // instead: to be asked first
  bool is_cut_off = false;                 // it is over before its program has said so
};

class AgentLoop {
 public:
  AgentLoop() = default;
  AgentLoop(const AgentLoop&) = delete;
  AgentLoop& operator=(const AgentLoop&) = delete;
  virtual ~AgentLoop() = default;

  virtual std::vector<AgentProgramOptions> programs() const = 0;

  // The tools that the chat template shows to the model, or null.
  virtual nlohmann::ordered_json tools(const Session&) const { return {}; }
  // True if the text of a turn is without special tokens.
  virtual bool skips_special(const Session&) const { return true; }
  // The most tokens of the turn that begins.
  virtual std::int64_t max_tokens(const Session&) const {
    return std::numeric_limits<std::int64_t>::max();
  }

  // Asks what has to be known before the first turn, and takes the answers. The prompt is made anew
  // of all messages, if some are for the model.
  virtual std::vector<AgentQuestion> begin(const Session&) const { return {}; }
  virtual AgentReply begun(Session&, std::span<const nlohmann::json>) const { return {}; }

  // The model has written `text`, and ended its turn or reached a limit of tokens. Adds it to the
  // messages; returns what is asked, or nothing: then the session is over.
  virtual std::vector<AgentQuestion> turn_is_over(Session& session,
                                                  const std::string& text) const = 0;
  // Takes the answers to these, in their order.
  virtual AgentReply answered(Session& session, std::span<const nlohmann::json> answers) const = 0;
  // The model cannot be given what a reply has for it, which is taken back. Returns what is asked
  // then; nothing: the session is cut off.
  virtual std::vector<AgentQuestion> is_refused(Session&,
                                                const AgentReply&,
                                                const std::string& /*why*/) const {
    return {};
  }

  // True if a turn is asked about: it ended by itself, another may follow.
  virtual bool asks_about(bool stopped, bool may_go_on) const { return stopped && may_go_on; }
  // The session is over before its program has said so: what the program is told, if anything.
  virtual std::optional<nlohmann::json> cut_off(const Session&) const { return std::nullopt; }
};

}  // namespace ferry::trainer
