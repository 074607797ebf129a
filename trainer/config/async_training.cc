#include "trainer/config/async_training.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "trainer/config/ppo_config.h"
#include "trainer/config/ppo_rules.h"

namespace ferry::trainer {
namespace {

const std::string kThreshold = "async_training.staleness_threshold";
const std::string kSyncStep = "async_training.trigger_parameter_sync_step";
const std::string kPartialRollout = "async_training.partial_rollout";

bool share_a_rank(const std::vector<int>& left, const std::vector<int>& right) {
  return std::ranges::any_of(
      left, [&](int rank) { return std::ranges::find(right, rank) != right.end(); });
}

// True if the rollout has none of a role's ranks; a role that names none has all.
bool generates_apart(const PpoConfig& c, const std::vector<int>& ranks) {
  return !ranks.empty() && !c.rollout.ranks.empty() && !share_a_rank(ranks, c.rollout.ranks);
}

// A role that is there shares no rank with a rollout that generates beside it.
template <typename IsThere, typename Role>
ConfigRule<PpoConfig> apart_from_rollout(const std::string& section,
                                         IsThere is_there,
                                         Role PpoConfig::*role,
                                         std::string says) {
  return {"async_training_needs_ranks_of_its_own",
          {kThreshold, kSyncStep, "trainer.one_step_off", section + ".ranks",
           kRolloutSection + ".ranks"},
          [=](const PpoConfig& c) {
            return !c.is_async() || !std::invoke(is_there, c) ||
                   generates_apart(c, (c.*role).ranks);
          },
          std::move(says)};
}

bool is_whole(double number) {
  return number == std::round(number);
}

ConfigRules<PpoConfig> partial_rollout_rules() {
  return {
      {"partial_answers_may_be_stale",
       {kPartialRollout, kThreshold, kSyncStep},
       [](const PpoConfig& c) {
         return !c.async_training.partial_rollout ||
                (c.async_training.staleness_threshold >= 2 &&
                 c.async_training.trigger_parameter_sync_step == 1);
       },
       "an answer that goes on with newer weights is learned from after two updates or more, and "
       "weights are handed over in every step"},
      {"more_prompts_than_a_step_takes",
       {kPartialRollout, "data.gen_batch_size", "data.train_batch_size"},
       [](const PpoConfig& c) {
         if (!c.async_training.partial_rollout) return true;
         return c.data.gen_batch_size && *c.data.gen_batch_size > c.data.train_batch_size &&
                *c.data.gen_batch_size <= 2 * c.data.train_batch_size;
       },
       "partial_rollout answers gen_batch_size prompts at a time, more than train_batch_size and "
       "at most twice as many, of which those that are finished first are learned from"},
  };
}

ConfigRules<PpoConfig> replica_rules() {
  return {{"replicas_of_the_host_have_no_devices",
           {kRolloutSection + ".replicas.devices", "trainer.device"},
           [](const PpoConfig& c) {
             return c.rollout.replicas.devices.empty() || c.trainer.run.device == DeviceKind::kCuda;
           },
           "devices are GPUs, and the replicas of a run are where the run is"},
          {"devices_are_of_replicas",
           {kRolloutSection + ".replicas.devices", kRolloutSection + ".replicas.num",
            kRolloutSection + ".replicas.elastic"},
           [](const PpoConfig& c) {
             return c.rollout.replicas.devices.empty() || c.rollout.replicas.enabled();
           },
           "there are no replicas that could take the devices"}};
}

}  // namespace

void list(ConfigTable& table, ReplicaConfig& c) {
  table.section(kRolloutSection + ".replicas",
                "Processes that answer beside each rank of the rollout (docs/training/async.md)");
  table.add("num", c.num, "that each rank starts", at_least(0));
  table.add("elastic", c.elastic, "others may join, by ferry train replica");
  table.add("timeout", c.timeout, "seconds after which one that says nothing is given up",
            at_least(1));
  table.add("start_timeout", c.start_timeout, "seconds that it may take to load the model",
            at_least(1));
  table.add("max_restarts", c.max_restarts, "times that each is started again", at_least(0));
  table.add(
      "devices", c.devices,
      "GPUs of a machine that replicas of its ranks take in turn; empty: those without a rank",
      at_least(0));
}

void list(ConfigTable& table, AsyncTrainingConfig& c) {
  table.section("async_training",
                "Training that does not wait for the rollout (docs/training/async.md)");
  table.add("staleness_threshold", c.staleness_threshold,
            "batches that are answered ahead, as a share of those between two transfers of "
            "weights; 0: none; with partial_rollout: updates that an answer's oldest token may be "
            "behind",
            at_least(0));
  table.add("trigger_parameter_sync_step", c.trigger_parameter_sync_step,
            "steps between two transfers of the actor's weights to the rollout", at_least(1));
  table.add("partial_rollout", c.partial_rollout,
            "learn from the answers that are finished first; the others go on with newer weights");
}

ConfigRules<PpoConfig> async_rules() {
  ConfigRules<PpoConfig> rules{
      apart_from_rollout(
          kActorSection, [](const PpoConfig&) { return true; }, &PpoConfig::actor,
          "generation beside training needs actor and rollout on ranks that they do not share"),
      apart_from_rollout(
          kRefSection, &PpoConfig::use_reference_policy, &PpoConfig::ref,
          "the reference is asked while the rollout generates: it needs other ranks"),
      apart_from_rollout("critic", &PpoConfig::use_critic, &PpoConfig::critic,
                         "the critic learns while the rollout generates: it needs other ranks"),
      apart_from_rollout(
          "reward_model", [](const PpoConfig& c) { return c.reward.enable; }, &PpoConfig::reward,
          "the reward model is asked while the rollout generates: it needs other ranks"),
      {"async_training_is_led_by_rank_0",
       {kThreshold, kSyncStep, "trainer.one_step_off", kRolloutSection + ".ranks"},
       [](const PpoConfig& c) {
         return !c.is_async() || c.rollout.ranks.empty() || c.rollout.ranks.front() != 0;
       },
       "rank 0 leads the training: while it generated nobody would learn"},
      {"one_step_off_is_a_threshold_of_1",
       {"trainer.one_step_off", kThreshold, kSyncStep, kPartialRollout},
       [](const PpoConfig& c) {
         return !c.trainer.one_step_off || c.async_training == AsyncTrainingConfig{};
       },
       "one_step_off is staleness_threshold = 1 alone"},
      {"whole_batches_are_answered_ahead",
       {kThreshold, kSyncStep},
       [](const PpoConfig& c) {
         return is_whole(c.async_training.staleness_threshold *
                         c.async_training.trigger_parameter_sync_step);
       },
       "the threshold's share of the batches between two transfers is a whole number of batches"},
      {"more_prompts_are_asked_at_once",
       {kThreshold, kSyncStep, "algorithm.filter_groups.enable", "algorithm.adv_estimator"},
       [](const PpoConfig& c) {
         const bool asks_again = c.algorithm.filter_groups.enable ||
                                 c.algorithm.adv_estimator == AdvantageEstimator::kRemax;
         return !asks_again || c.max_staleness() <= 1;
       },
       "dynamic sampling and remax ask the rollout again for the batch in hand, which is at most "
       "one step off"},
  };
  for (auto& rule : partial_rollout_rules()) rules.push_back(std::move(rule));
  for (auto& rule : replica_rules()) rules.push_back(std::move(rule));
  return rules;
}

bool PpoConfig::is_async() const {
  return batches_ahead() > 0 || async_training.trigger_parameter_sync_step > 1;
}

std::int64_t PpoConfig::batches_ahead() const {
  if (trainer.one_step_off) return 1;
  return std::llround(async_training.staleness_threshold *
                      async_training.trigger_parameter_sync_step);
}

std::int64_t PpoConfig::max_staleness() const {
  return batches_ahead() + async_training.trigger_parameter_sync_step - 1;
}

}  // namespace ferry::trainer
