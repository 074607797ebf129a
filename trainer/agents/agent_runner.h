// Runs sessions by an engine: the model's turns are requests to it, whose prompts are the session
// so far, and between turns programs are asked. Sessions do not wait for each other.
//
// A token is drawn by (the session's seed, its place in the session), and in `bitwise` has the same
// bytes whatever else the engine computes: sessions whose programs give the same answers are the
// same, however long these took. Programs are started once, by the first rank of a tensor parallel
// group, and used for all sessions.
//
// A run may end before its sessions do. Sessions that are not over go on in a later one, with the
// weights that the engine has then: each token tells which drew it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "models/distributed/process_group.h"
#include "rollout/llm_engine.h"
#include "trainer/agents/agent_loop.h"
#include "trainer/agents/agent_program.h"
#include "trainer/agents/session.h"
#include "trainer/agents/tools.h"
#include "trainer/config/agent_sections.h"
#include "trainer/dataset/prompt_examples.h"
#include "trainer/metrics/timeline.h"

namespace ferry::trainer {

struct AgentLimits {
  std::int64_t max_prompt_length = 0;    // tokens; of a prompt that the environment adds to
  std::int64_t max_response_length = 0;  // tokens of all turns
};

// Called while run() works.
struct SessionObserver {
  std::function<void(std::size_t number)> is_over = [](std::size_t) {};  // a session
  std::function<void()> poll = [] {};                                    // now and then
  // If set, run() calls it before each step of the engine and begins, or goes on with, the sessions
  // that it returns and no others, until it returns nothing. It may append to the sessions, and
  // must return the same on all ranks of a model. `waits`: there is nothing else to do.
  std::function<std::optional<std::vector<std::size_t>>(bool waits)> next{};
};

class AgentRunner {
 public:
  // The engine, the encoder and `tp` outlive this. `tp`: the ranks that compute the same sessions.
  AgentRunner(const AgentSections& config,
              const Tools& tools,
              const AgentLimits& limits,
              rollout::LLMEngine& engine,
              const PromptEncoder& encoder,
              const models::ProcessGroup& tp);
  ~AgentRunner();

  // Begins the sessions, or goes on with them, and returns when all are over or `is_enough` says
  // so. `is_enough` is asked after each step of the engine and must say the same on all ranks of
  // `tp`; run() then waits for questions that are open and stops everything else. All turns use
  // `params` but for seed and max_tokens. `global_step`: the training step that the engine's
  // weights are from. All ranks of `tp` call this, and all that share experts: these take the same
  // steps of the engine until none has anything left, even a rank that has nothing to draw or has
  // enough. Throws Error of the engine, or of an environment.
  void run(
      std::vector<Session>& sessions,
      const rollout::SamplingParams& params,
      std::int64_t global_step,
      const SessionObserver& observer = {},
      const std::function<bool()>& is_enough = [] { return false; });

  // Spans from question to answer, of all since this was called last: "tool/<name>",
  // "env/<method>", "program/<method>".
  std::vector<Span> take_spans() { return std::exchange(spans_, {}); }

 private:
  // Questions of a session that have been asked.
  struct Asked {
    std::vector<AgentQuestion> questions{};
    std::vector<nlohmann::json> answers{};
    std::size_t num_answers = 0;
  };
  struct Place {
    std::size_t session = 0;
    std::size_t question = 0;
    double asked = 0;  // seconds since 1970
  };
  struct Loop {
    std::unique_ptr<AgentLoop> loop{};  // null: single turn
    std::size_t first_program = 0;
  };

  void add_loop(AgentLoopKind kind, std::unique_ptr<AgentLoop> loop);
  const AgentLoop* loop_of(const Session& session) const;
  void step();
  void abort();
  void start(std::size_t number);
  void begin(std::size_t number);
  void generate(std::size_t number);
  void take_answers(bool wait);
  void interrupt();
  bool may_go_on(const Session& session) const;
  void take(std::size_t number, const rollout::RequestOutput& output);
  void turn_is_over(std::size_t number, bool stopped);
  void ask(std::size_t number, std::vector<AgentQuestion> questions);
  std::vector<AgentAnswer> receive(bool wait);
  // True if the model goes on.
  bool resume(std::size_t number);
  std::vector<std::int64_t> encoded(const Session& session, const AgentReply& reply) const;
  bool refuses(std::size_t number, const AgentReply& reply, const std::string& why);
  bool prompt_is_known(std::size_t number, const AgentReply& reply);
  void append(Session& session, const std::vector<std::int64_t>& tokens) const;
  void cut_off(std::size_t number);

  AgentSections config_;
  AgentLimits limits_;
  rollout::LLMEngine& engine_;
  const PromptEncoder& encoder_;
  const models::ProcessGroup& tp_;
  std::map<AgentLoopKind, Loop> loops_;
  std::vector<std::unique_ptr<AgentProgram>> programs_;  // of all loops, on the first rank of tp
  std::int64_t next_id_ = 0;                             // of a question
  std::vector<Span> spans_;
  // Set while run() works:
  std::vector<Session>* sessions_ = nullptr;
  SessionObserver observer_{};
  rollout::SamplingParams params_{};
  std::int64_t global_step_ = 0;
  std::map<std::size_t, Asked> asked_;    // by session
  std::map<std::int64_t, Place> places_;  // of the questions that are open
  std::set<std::size_t> ready_;           // sessions whose questions are answered
};

}  // namespace ferry::trainer
