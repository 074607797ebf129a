// A program of the user's that tools or an environment are: it reads a question and writes an
// answer on each line, in JSON, with the question's id. Answers may come in any order. Programs
// that speak otherwise derive from it.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace ferry::trainer {

class ChildProcess;

enum class AgentProtocol : std::uint8_t {
  kLines,    // of questions and answers, as below
  kMcp,      // mcp_server.h
  kSession,  // session_program.h
  kHttp,     // http_environment.h
};

struct AgentProgramOptions {
  std::string command{};                                         // for /bin/sh
  std::chrono::milliseconds timeout = std::chrono::seconds(60);  // of each answer
  AgentProtocol protocol = AgentProtocol::kLines;
  bool operator==(const AgentProgramOptions&) const = default;
};

// The JSON object that is the answer of a program, which may be broken or hostile. Throws
// Error(kCorrupt) for anything else.
nlohmann::json parse_answer(std::string_view text);

struct AgentAnswer {
  std::int64_t id = 0;
  nlohmann::json answer{};  // an object; {"error": "..."} if the program has none
};

class AgentProgram {
 public:
  // Starts the program when it is first asked.
  explicit AgentProgram(AgentProgramOptions options);
  virtual ~AgentProgram();
  AgentProgram(const AgentProgram&) = delete;
  AgentProgram& operator=(const AgentProgram&) = delete;

  // `question` is an object, which gets the id.
  virtual void ask(std::int64_t id, nlohmann::json question);
  // Something that is not answered. Not said to a program that does not run.
  virtual void tell(const nlohmann::json& notice);

  // The answers that are there; waits for a first one, but no longer than that. Every question is
  // answered: if one takes too long, or the program ends or says something else, all that are
  // open get an error, and the next question starts the program anew.
  virtual std::vector<AgentAnswer> answers(std::chrono::milliseconds wait);

 protected:
  std::size_t unsent_bytes() const { return unsent_.size(); }
  // The process has just been started.
  virtual void begin() {}
  virtual void put(std::int64_t id, nlohmann::json question);
  // Takes a line: an answer, if it is one to a question that is open. Throws Error to give the
  // program up.
  virtual void hear(const std::string& line, std::vector<AgentAnswer>& answers);

  void send(const nlohmann::json& line);
  bool has_open() const { return !open_.empty(); }
  // True if that question was open.
  bool close(std::int64_t id) { return open_.erase(id) > 0; }

 private:
  using Clock = std::chrono::steady_clock;

  void converse(std::chrono::milliseconds wait, std::vector<AgentAnswer>& answers);
  std::vector<AgentAnswer> give_up(const std::string& why);

  AgentProgramOptions options_;
  std::unique_ptr<ChildProcess> process_;
  std::string unsent_;
  std::map<std::int64_t, Clock::time_point> open_;  // questions, and when their time is over
};

}  // namespace ferry::trainer
