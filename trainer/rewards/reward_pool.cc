#include "trainer/rewards/reward_pool.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "distckpt/base/error.h"
#include "trainer/metrics/metric_log.h"

namespace ferry::trainer {

RewardPool::RewardPool(const RewardCommandOptions& options, int num_workers) {
  for (int i = 0; i < num_workers; ++i) workers_.emplace_back(options);
}

void RewardPool::begin(std::size_t size) {
  scores_.assign(size, {});
  asked_.assign(size, 0);
}

void RewardPool::ask(std::size_t row, const RewardRequest& request) {
  asked_[row] = wall_time();
  std::ranges::min_element(workers_, {}, &RewardCommand::num_unanswered)->ask(row, request);
}

void RewardPool::poll() {
  take(std::chrono::milliseconds(0));
}

const std::vector<RewardScore>& RewardPool::finish() {
  const std::chrono::milliseconds wait(std::max<std::size_t>(1, 100 / workers_.size()));
  while (std::ranges::any_of(workers_, [](const auto& one) { return one.num_unanswered() > 0; }))
    take(wait);
  return scores_;
}

std::int64_t RewardPool::num_restarts() const {
  std::int64_t count = 0;
  for (const auto& worker : workers_) count += worker.num_restarts();
  return count;
}

void RewardPool::take(std::chrono::milliseconds wait) {
  for (std::size_t i = 0; i < workers_.size(); ++i) {
    try {
      for (auto& [row, score] : workers_[i].answers(wait)) {
        scores_[row] = std::move(score);
        spans_.push_back({.name = "reward/worker", .start = asked_[row], .end = wall_time()});
      }
    } catch (Error& error) {
      error.add_context(fmt::format("scoring by reward worker {} of {}", i + 1, workers_.size()));
      throw;
    }
  }
}

}  // namespace ferry::trainer
