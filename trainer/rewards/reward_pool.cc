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

void RewardPool::ask(std::size_t number, const RewardRequest& request) {
  require(!asked_.contains(number) && !scores_.contains(number), ErrorKind::kBug,
          "reward pool: is asked about {} twice", number);
  asked_.emplace(number, steady_time());
  std::ranges::min_element(workers_, {}, &RewardCommand::num_unanswered)->ask(number, request);
}

void RewardPool::poll() {
  receive(std::chrono::milliseconds(0));
}

std::vector<RewardScore> RewardPool::take_scores(std::span<const std::size_t> numbers) {
  const std::chrono::milliseconds wait(std::max<std::size_t>(1, 100 / workers_.size()));
  while (std::ranges::any_of(numbers, [&](auto number) { return asked_.contains(number); }))
    receive(wait);
  std::vector<RewardScore> taken;
  for (const auto number : numbers) {
    auto score = scores_.extract(number);
    require(!score.empty(), ErrorKind::kBug, "reward pool: was not asked about {}", number);
    taken.push_back(std::move(score.mapped()));
  }
  return taken;
}

std::int64_t RewardPool::num_restarts() const {
  std::int64_t count = 0;
  for (const auto& worker : workers_) count += worker.num_restarts();
  return count;
}

void RewardPool::receive(std::chrono::milliseconds wait) {
  for (std::size_t i = 0; i < workers_.size(); ++i) {
    try {
      for (auto& [number, score] : workers_[i].answers(wait)) {
        const auto asked = asked_.extract(number).mapped();
        scores_.emplace(number, std::move(score));
        spans_.push_back({.name = "reward/worker", .start = asked, .end = steady_time()});
      }
    } catch (Error& error) {
      error.add_context(fmt::format("scoring by reward worker {} of {}", i + 1, workers_.size()));
      throw;
    }
  }
}

}  // namespace ferry::trainer
