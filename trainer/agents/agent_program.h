// A program of the user's that tools or an environment are: it reads a question and writes an
// answer on each line, in JSON, with the question's id. Answers may come in any order. Programs
// that speak otherwise derive from it.
#pragma once

#include <chrono>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
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
  bool keeps_sessions = false;  // between questions: a program that is started anew has lost them
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
  // answered. One that takes too long gets {"error": "...", "timed_out": true}, and what the
  // program says to it later counts for nothing; others go on.
  //
  // A program that has answered none of the questions behind one may do one after the other: the
  // time of that one begins when the one before it is answered. If it is over, the program hangs.
  // It is started anew, and asked all others again; if it keeps sessions, it runs on. So it is
  // where it ends or says something else: the question that it had in hand gets the error. When
  // that happens once more (to one that keeps sessions and hangs), or twice more, with no answer
  // in between, all that are open get an error; so they do at once where a program that keeps
  // sessions or has answered questions behind one that is open ends or says something else.
  virtual std::vector<AgentAnswer> answers(std::chrono::milliseconds wait);

 protected:
  std::size_t unsent_bytes() const { return unsent_.size(); }
  // The process has just been started.
  virtual void begin() {}
  virtual void put(std::int64_t id, nlohmann::json question);
  // Takes a line: an answer, if it is one to a question that is open. Throws Error to give the
  // program up.
  virtual void hear(const std::string& line, std::vector<AgentAnswer>& answers);
  // The question has got its error, since its time is over.
  virtual void timed_out(std::int64_t id) { expect_late(id); }

  void send(const nlohmann::json& line);
  bool has_open() const { return !open_.empty(); }
  // Called with an answer to it. True if that question was open.
  bool close(std::int64_t id);
  // True, once, for an answer that comes too late.
  bool is_late(std::int64_t id);
  void expect_late(std::int64_t id) { late_.insert(id); }

 private:
  using Clock = std::chrono::steady_clock;
  struct Open {
    nlohmann::json question{};
    Clock::time_point asked{};
  };
  using OpenQuestions = std::map<std::int64_t, Open>;  // in the order in which they were asked

  void converse(std::chrono::milliseconds wait, std::vector<AgentAnswer>& answers);
  void end_late(Clock::time_point now, std::vector<AgentAnswer>& answers);
  OpenQuestions::iterator time_out(OpenQuestions::iterator one, std::vector<AgentAnswer>& answers);
  std::string too_late() const;
  void stop();
  void ask_again();
  void break_off(const std::string& why, std::vector<AgentAnswer>& answers);

  AgentProgramOptions options_;
  std::unique_ptr<ChildProcess> process_;
  std::string unsent_;
  OpenQuestions open_;
  // The next ones are of this process.
  std::set<std::int64_t> late_;  // questions whose time was over, and that it may still answer
  std::int64_t last_answered_ = std::numeric_limits<std::int64_t>::min();  // of those answered
  Clock::time_point heard_{};  // when it answered last, or a time was over
  int num_silent_ = 0;         // faults with no answer since, also of processes before
};

}  // namespace ferry::trainer
