// An environment behind a URL: questions are the bodies of requests to URL/reset, URL/step and
// URL/close, whose responses are the answers. Several are under way at a time, none is sent twice.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "trainer/agents/agent_program.h"

namespace ferry::trainer {

class HttpEnvironment : public AgentProgram {
 public:
  // The command of `options` is the URL.
  explicit HttpEnvironment(AgentProgramOptions options);
  // Gives notices that are left a second.
  ~HttpEnvironment() override;

  void ask(std::int64_t id, nlohmann::json question) override;
  void tell(const nlohmann::json& notice) override;
  // A question that is not answered as it should be gets an error, and the others go on. It has
  // "timed_out" if its time is over, but for a second one with no other answer in between: then the
  // environment hangs.
  std::vector<AgentAnswer> answers(std::chrono::milliseconds wait) override;

 private:
  struct Request {
    std::int64_t id = -1;  // -1: nobody waits for an answer
    nlohmann::json body{};
  };

  void add(Request request);
  void work();
  nlohmann::json answer_to(nlohmann::json question) const;

  AgentProgramOptions options_;
  std::mutex mutex_;
  std::condition_variable added_, answered_, idle_;
  std::deque<Request> requests_;  // that nobody has sent
  std::vector<AgentAnswer> answers_;
  std::size_t num_open_ = 0;           // questions whose answer was not taken
  std::size_t num_working_ = 0;        // workers that have a request
  bool was_silent_ = false;            // the last answer was that a time is over
  bool stopping_ = false;              // only notices are sent
  std::stop_source stop_;              // nothing is
  std::vector<std::jthread> workers_;  // as many as have been needed at a time
};

}  // namespace ferry::trainer
