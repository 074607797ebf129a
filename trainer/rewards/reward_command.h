// Rewards from a program of the user's, started once, that reads a question and writes an answer on
// each line, in JSON (docs/training/rewards.md):
//
//   {"id": 7, "data_source": "...", "solution_str": "...", "ground_truth": ..., "extra_info":
//   {...},
//    "prompt": "...", "prompt_ids": [...], "response_ids": [...], "finish_reason": "stop",
//    "num_turns": 2, "messages": [...]}
//   {"id": 7, "score": 0.5, ...}
//
// Answers may come in any order. Every question is answered, or it is an error: nothing is scored
// by default.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
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
  std::string prompt{};
  std::vector<std::int64_t> prompt_ids{};
  std::vector<std::int64_t> response_ids{};
  std::string finish_reason{};
  int num_turns = 2;
  std::string messages = "null";  // JSON: the conversation, where an answer may have several turns
};

class RewardCommand {
 public:
  // Starts the program when it is first asked.
  explicit RewardCommand(RewardCommandOptions options);
  ~RewardCommand();
  RewardCommand(RewardCommand&&) noexcept;
  RewardCommand& operator=(RewardCommand&&) noexcept;

  // `number` is the caller's, and comes with the answer.
  void ask(std::size_t number, const RewardRequest& request);
  // The answers that are there; waits for a first one, but no longer than that, where something is
  // asked. Throws Error(kIo) if the program goes on hanging or ending, and Error(kCorrupt) for an
  // answer that is none; the program is ended then, nothing is asked any more, and a next question
  // starts it again.
  std::vector<std::pair<std::size_t, RewardScore>> answers(std::chrono::milliseconds wait);
  std::size_t num_unanswered() const { return unanswered_.size(); }

  // The score of each request, in their order. Throws as answers() does.
  std::vector<RewardScore> compute_score(std::span<const RewardRequest> requests);

  std::int64_t num_restarts() const { return num_restarts_; }  // so far

 private:
  using Clock = std::chrono::steady_clock;
  struct Question {
    std::size_t number = 0;
    std::string line{};   // without its id
    std::string shown{};  // for people
  };

  void start();
  void send(std::int64_t id, const Question& question);
  // Takes an answer, if one comes in time; or says why no more will come.
  std::string converse(std::chrono::milliseconds wait,
                       std::vector<std::pair<std::size_t, RewardScore>>& scores);
  void start_again(const std::string& trouble);

  RewardCommandOptions options_;
  std::unique_ptr<ChildProcess> process_;
  std::string unsent_;  // questions, the first `sent_` bytes of which are sent
  std::size_t sent_ = 0;
  std::map<std::int64_t, Question> unanswered_;
  std::size_t num_asked_ = 0;  // since all was answered
  Clock::time_point heard_{};  // an answer, or that it was asked
  bool has_answered_ = false;  // this process
  int failures_ = 0;           // in a row
  std::int64_t next_id_ = 0;   // of a question: unlike all before
  std::int64_t num_restarts_ = 0;
};

}  // namespace ferry::trainer
