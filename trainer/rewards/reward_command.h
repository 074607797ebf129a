// Rewards from a program of the user's, started once, that reads a question and writes an answer on
// each line, in JSON (docs/training/rewards.md):
//
//   {"id": 7, "data_source": "...", "solution_str": "...", "ground_truth": ..., "extra_info":
//   {...}}
//   {"id": 7, "score": 0.5, ...}
//
// Answers may come in any order. Every question is answered, or it is an error: nothing is scored
// by default.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "trainer/rewards/reward_score.h"

namespace ferry::trainer {

class ChildProcess;

struct RewardCommandOptions {
  std::string command{};  // for /bin/sh
  // A program that says nothing for so long, while it is asked, hangs. The first answer of a
  // program that has just been started may take longer.
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
  std::chrono::milliseconds start_timeout = std::chrono::seconds(300);
  // A program that hangs or ends is started again and asked what it left unanswered, so many times
  // without an answer in between.
  int max_restarts = 2;
};

struct RewardRequest {
  std::string data_source{};
  std::string solution_str{};
  std::string ground_truth = "null";  // JSON: "\"72\""
  std::string extra_info = "{}";      // JSON
};

class RewardCommand {
 public:
  // Starts the program when it is first asked.
  explicit RewardCommand(RewardCommandOptions options);
  ~RewardCommand();

  // The score of each request, in their order. Throws Error(kIo) if the program goes on hanging or
  // ending, and Error(kCorrupt) for an answer that is none; it is ended then, and a next call
  // starts it again.
  std::vector<RewardScore> compute_score(std::span<const RewardRequest> requests);

  std::int64_t num_restarts() const { return num_restarts_; }  // so far

 private:
  using Unanswered = std::map<std::int64_t, std::size_t>;  // id -> request

  std::string ask(std::span<const RewardRequest> requests, const Unanswered& unanswered) const;
  // Until all is answered, or (saying why) no more will come.
  std::string converse(std::string_view questions,
                       Unanswered& unanswered,
                       std::vector<RewardScore>& scores);

  RewardCommandOptions options_;
  std::unique_ptr<ChildProcess> process_;
  bool has_answered_ = false;  // this process
  std::int64_t next_id_ = 0;   // of a question: unlike all before
  std::int64_t num_restarts_ = 0;
};

}  // namespace ferry::trainer
