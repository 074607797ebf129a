// The model calls tools, and goes on with their answers (verl's tool_agent). A turn without a call
// is the last. Thoughts have none.
#pragma once

#include "trainer/agents/agent_loop.h"
#include "trainer/agents/tools.h"
#include "trainer/config/agent_sections.h"
#include "trainer/dataset/prompt_examples.h"

namespace ferry::trainer {

class ToolAgentLoop : public AgentLoop {
 public:
  // The encoder outlives this.
  ToolAgentLoop(Tools tools, const AgentSections& config, const PromptEncoder& encoder);

  std::vector<AgentProgramOptions> programs() const override { return tools_.programs; }
  // The schemas that the record selects.
  nlohmann::ordered_json tools(const Session& session) const override;
  bool skips_special(const Session&) const override { return false; }
  // {"session": ..., "name": "...", "arguments": {...}} for each call, and, for the program alone,
  // "tools_kwargs": what extra_info.tools_kwargs of the record has for the tool.
  std::vector<AgentQuestion> turn_is_over(Session& session, const std::string& text) const override;
  // {"content": "...", "reward": 0.5}, the reward only if there is one; or {"error": "..."}, which
  // the model is told.
  AgentReply answered(Session& session, std::span<const nlohmann::json> answers) const override;

 private:
  Tools tools_;
  MultiTurnSection config_;
  std::optional<rollout::text::ReasoningFormat> reasoning_;
  const PromptEncoder& encoder_;
};

}  // namespace ferry::trainer
