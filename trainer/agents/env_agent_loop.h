// The model acts in an environment, a program with `reset` and `step` as in Gymnasium
// (docs/training/agents.md): each turn is an action, the observation is the next message.
//
//   {"method": "reset", "session": ..., "data_source": ..., "ground_truth": ..., "extra_info": ...}
//   {}, or {"observation": "..."}: the user's message at the end of the prompt
//   {"method": "step", "session": ..., "action": "..."}
//   {"observation": "...", "reward": 0.0, "done": false}, with {"info": {...}} for the reward's log
#pragma once

#include <string>

#include "trainer/agents/agent_loop.h"
#include "trainer/config/agent_sections.h"

namespace ferry::trainer {

class EnvAgentLoop : public AgentLoop {
 public:
  explicit EnvAgentLoop(const AgentSection& config) : config_(config) {}

  std::vector<AgentProgramOptions> programs() const override;
  std::vector<AgentQuestion> begin(const Session& session) const override;
  AgentReply begun(Session& session, std::span<const nlohmann::json> answers) const override;
  std::vector<AgentQuestion> turn_is_over(Session& session, const std::string& text) const override;
  // All throw Error(kCorrupt) for an answer that is none: a session without its environment is
  // worth nothing.
  AgentReply answered(Session& session, std::span<const nlohmann::json> answers) const override;
  // A turn that none can follow is worth a reward, too.
  bool asks_about(bool stopped, bool) const override { return stopped; }
  std::optional<nlohmann::json> cut_off(const Session& session) const override;

 private:
  AgentSection config_;
};

}  // namespace ferry::trainer
