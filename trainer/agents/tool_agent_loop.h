// The model calls tools, and goes on with their answers (verl's tool_agent). A turn without a call
// is the last.
#pragma once

#include "trainer/agents/agent_loop.h"
#include "trainer/agents/tools.h"
#include "trainer/config/agent_sections.h"

namespace ferry::trainer {

class ToolAgentLoop : public AgentLoop {
 public:
  ToolAgentLoop(Tools tools, const MultiTurnSection& config);

  std::vector<AgentProgramOptions> programs() const override { return tools_.programs; }
  nlohmann::ordered_json tools(const Session&) const override { return tools_.schemas; }
  bool skips_special(const Session&) const override { return false; }
  // {"session": ..., "name": "...", "arguments": {...}} for each call.
  std::vector<AgentQuestion> turn_is_over(Session& session, const std::string& text) const override;
  // {"content": "...", "reward": 0.5}, the reward only if there is one; or {"error": "..."}, which
  // the model is told.
  AgentReply answered(Session& session, std::span<const nlohmann::json> answers) const override;

 private:
  Tools tools_;
  MultiTurnSection config_;
};

}  // namespace ferry::trainer
