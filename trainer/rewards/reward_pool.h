// Several processes of one reward program, each asked as soon as an answer is there to be scored,
// while others are still being written.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "trainer/metrics/timeline.h"
#include "trainer/rewards/reward_command.h"
#include "trainer/rewards/reward_score.h"

namespace ferry::trainer {

class RewardPool {
 public:
  RewardPool(const RewardCommandOptions& options, int num_workers);

  // Begins anew: `size` requests may follow, none of which is known.
  void begin(std::size_t size);
  // Asks the worker with the fewest questions. `row`: below the size.
  void ask(std::size_t row, const RewardRequest& request);
  // Takes the answers that are there. Throws the error of a worker, which it names.
  void poll();
  // Waits for all answers. Returns the score of each row; one that was not asked has none.
  const std::vector<RewardScore>& finish();
  std::int64_t num_restarts() const;  // of all workers, so far
  // From the question to the answer, of each since this was called last.
  std::vector<Span> take_spans() { return std::exchange(spans_, {}); }

 private:
  void take(std::chrono::milliseconds wait);

  std::vector<RewardCommand> workers_;
  std::vector<RewardScore> scores_;
  std::vector<double> asked_;  // [rows], seconds since 1970
  std::vector<Span> spans_;
};

}  // namespace ferry::trainer
