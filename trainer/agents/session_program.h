// A program that asks the model over HTTP: it reads a line for each session, with the address of
// the session's endpoint, and writes a line when the session is over. A request of the program is
// an answer to the question that is open in its session, and the next question has the response.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "serve/http/http_server.h"
#include "trainer/agents/agent_program.h"

namespace ferry::trainer {

class SessionProgram : public AgentProgram {
 public:
  explicit SessionProgram(AgentProgramOptions options);
  ~SessionProgram() override;

  std::vector<AgentAnswer> answers(std::chrono::milliseconds wait) override;

 protected:
  // Serves on a port of loopback that is free.
  void begin() override;
  void put(std::int64_t id, nlohmann::json question) override;
  void hear(const std::string& line, std::vector<AgentAnswer>& answers) override;
  void timed_out(std::int64_t id) override;

 private:
  using ExchangePtr = std::shared_ptr<serve::Exchange>;
  struct Asked {
    std::string path{}, body{};
    bool operator==(const Asked&) const = default;
  };
  struct OpenSession {
    std::int64_t line = 0;   // the id of the program's line
    std::int64_t open = -1;  // of the question that a request answers; none while the model answers
    Asked asked{};           // the last request
    ExchangePtr exchange{};  // that waits for its response
    serve::HttpResponse response{.status = 0};  // to it, once it is there
    nlohmann::json end{};  // the program's, where its client gave up while the model answers
  };

  void handle(const ExchangePtr& exchange);
  serve::HttpResponse take(const ExchangePtr& exchange);

  std::string api_key_;
  std::unique_ptr<serve::HttpServer> http_;
  std::jthread thread_;  // the server's
  std::mutex mutex_;     // of what follows
  std::condition_variable arrived_;
  std::map<std::uint64_t, OpenSession> sessions_;
  std::vector<AgentAnswer> requests_;
};

}  // namespace ferry::trainer
