// A program of the user's talks to the model as to a server with OpenAI's API
// (docs/training/agents.md). Its first request is the prompt, a request that goes on behind the
// model's answer is the next message, its end has the reward.
//
//   {"method": "run", "session": ..., "prompt": [...], "data_source": ..., "ground_truth": ...}
//   {"path": "/chat/completions", "request": "..."}
//   {"method": "answer", "session": ..., "content": "...", "finish_reason": "stop"}, whose details
//   are the response; {"path": ..., "request": ...}, or {"reward": 1.0}: the session is over
//   {"method": "refuse", "session": ..., "message": "..."}: to a request that does not go on
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "serve/api/generation_request.h"
#include "serve/api/served_model.h"
#include "trainer/agents/agent_loop.h"
#include "trainer/config/agent_sections.h"
#include "trainer/dataset/prompt_examples.h"

namespace ferry::trainer {

// A request of the program, read once.
struct ProgramRequest {
  // Its prompt is a place holder, if it is a chat without prompt_token_ids.
  serve::GenerationRequest generation{};
  nlohmann::ordered_json tools{};  // for the chat template, or null
  bool has_ids = false;            // the prompt is token ids
};

class ProgramAgentLoop : public AgentLoop {
 public:
  // The encoder outlives this.
  ProgramAgentLoop(const AgentSections& config, const PromptEncoder& encoder);

  std::vector<AgentProgramOptions> programs() const override;
  // The next three are those of the request under way.
  nlohmann::ordered_json tools(const Session& session) const override;
  bool skips_special(const Session& session) const override;
  std::int64_t max_tokens(const Session& session) const override;
  std::vector<AgentQuestion> begin(const Session& session) const override;
  AgentReply begun(Session& session, std::span<const nlohmann::json> answers) const override;
  std::vector<AgentQuestion> turn_is_over(Session& session, const std::string& text) const override;
  // Both throw Error(kCorrupt) for a program that has failed, or ends without a turn.
  AgentReply answered(Session& session, std::span<const nlohmann::json> answers) const override;
  std::vector<AgentQuestion> is_refused(Session& session,
                                        const AgentReply& reply,
                                        const std::string& why) const override;
  bool asks_about(bool, bool) const override { return true; }

 private:
  ProgramRequest read(const nlohmann::json& asked, nlohmann::ordered_json body) const;
  std::shared_ptr<const ProgramRequest> request(const Session& session) const;
  AgentReply take_request(Session& session, const nlohmann::json& asked) const;

  AgentSection config_;
  const PromptEncoder& encoder_;
  serve::ServedModel model_;
};

}  // namespace ferry::trainer
