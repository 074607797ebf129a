// Several processes of one reward program, each asked as soon as an answer is there to be scored,
// while others are still being written.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "trainer/metrics/timeline.h"
#include "trainer/rewards/reward_command.h"
#include "trainer/rewards/reward_score.h"

namespace ferry::trainer {

class RewardPool {
 public:
  RewardPool(const RewardCommandOptions& options, int num_workers);

  // Asks the worker with the fewest questions. `number`: the caller's, of no request whose score it
  // has not taken.
  void ask(std::size_t number, const RewardRequest& request);
  // Takes the answers that are there. Throws the error of a worker, which it names.
  void poll();
  // Waits for the answers to these requests, and hands their scores over. Others stay asked.
  std::vector<RewardScore> take_scores(std::span<const std::size_t> numbers);
  std::int64_t num_restarts() const;  // of all workers, so far
  // Spans from question to answer, of all since this was called last.
  std::vector<Span> take_spans() { return std::exchange(spans_, {}); }

 private:
  void receive(std::chrono::milliseconds wait);

  std::vector<RewardCommand> workers_;
  std::map<std::size_t, double> asked_;        // by number, without a score: seconds since 1970
  std::map<std::size_t, RewardScore> scores_;  // by number, not taken yet
  std::vector<Span> spans_;
};

}  // namespace ferry::trainer
