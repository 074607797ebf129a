// When the rollout answers what: the schedules of verl's fully_async_policy that a rollout as fast
// as the trainer keeps to.
#include "trainer/ppo/async_schedule.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <vector>

namespace ferry::trainer {
namespace async_schedule_test {

using Steps = std::vector<std::int64_t>;

PpoConfig config_of(double staleness_threshold, int trigger_parameter_sync_step = 1) {
  PpoConfig config;
  config.async_training.staleness_threshold = staleness_threshold;
  config.async_training.trigger_parameter_sync_step = trigger_parameter_sync_step;
  return config;
}

// The updates by which the weights that answer each batch are older than those that learn from it.
Steps staleness(const PpoConfig& config, std::int64_t steps, const std::set<std::int64_t>& saved) {
  AsyncSchedule schedule(
      config, [&](std::int64_t step) { return saved.contains(step); }, 0, steps);
  Steps found;
  std::int64_t weights = 0, asked = 0;
  for (std::int64_t step = 1; step <= steps; ++step) {
    schedule.begin_step(step);
    EXPECT_EQ(schedule.begins_anew(), step == 1 || saved.contains(step - 1));
    if (asked < step) {
      weights = step - 1;
      found.push_back(0);
      ++asked;
    }
    if (schedule.syncs_weights()) weights = step - 1;
    for (; asked < schedule.last_batch(); ++asked) found.push_back(asked - weights);
  }
  return found;
}

TEST(AsyncSchedule, AnswersNothingAheadWithoutAThreshold) {
  EXPECT_EQ(staleness(config_of(0), 4, {}), (Steps{0, 0, 0, 0}));
}

TEST(AsyncSchedule, IsOneStepOffWithAThresholdOf1) {
  PpoConfig one_step_off;
  one_step_off.trainer.one_step_off = true;
  const Steps expected{0, 1, 1, 1, 1, 1};
  EXPECT_EQ(staleness(config_of(1), 6, {3}), expected);
  EXPECT_EQ(staleness(one_step_off, 6, {3}), expected);
}

TEST(AsyncSchedule, AnswersAcrossACheckpointAsWithout) {
  EXPECT_EQ(staleness(config_of(2), 9, {5}), staleness(config_of(2), 9, {}));
  EXPECT_EQ(staleness(config_of(2), 9, {5}), (Steps{0, 1, 2, 2, 2, 2, 2, 2, 2}));
}

// A run that goes on has no others.
TEST(AsyncSchedule, HandsOverTheWeightsOfACheckpoint) {
  EXPECT_EQ(staleness(config_of(0, 3), 7, {2}), (Steps{0, 1, 2, 1, 2, 0, 1}));
  EXPECT_EQ(staleness(config_of(0.5, 2), 7, {3}), (Steps{0, 1, 2, 1, 1, 2, 1}));
}

TEST(AsyncSchedule, KeepsTheWeightsBetweenTwoTransfers) {
  EXPECT_EQ(staleness(config_of(0, 3), 7, {}), (Steps{0, 1, 2, 0, 1, 2, 0}));
  EXPECT_EQ(staleness(config_of(0.5, 2), 7, {}), (Steps{0, 1, 2, 1, 2, 1, 2}));
}

TEST(AsyncSchedule, AsksForMorePromptsThanAStepTakes) {
  auto config = config_of(2);
  config.async_training.partial_rollout = true;
  config.data.train_batch_size = 4;
  config.data.gen_batch_size = 6;
  AsyncSchedule schedule(
      config, [](std::int64_t) { return false; }, 0, 3);
  schedule.begin_step(1);
  EXPECT_EQ(schedule.last_batch(), 2);
  EXPECT_EQ(schedule.prompts_until(1), 6);
  EXPECT_EQ(schedule.prompts_until(2), 10);
  EXPECT_EQ(schedule.prompts_until(3), 12);
}

}  // namespace async_schedule_test
}  // namespace ferry::trainer
