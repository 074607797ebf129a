#include "trainer/ppo/batch_worker.h"

#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "trainer/engine/run_options.h"
#include "trainer/ppo/batch_samples.h"
#include "trainer/ppo/ppo_batch.h"
#include "trainer/ppo/ppo_metrics.h"

namespace ferry::trainer {
namespace {

// The lengths and these columns, without tokens.
RolloutBatch columns_of(const RolloutBatch& batch,
                        std::initializer_list<at::Tensor RolloutBatch::*> columns) {
  auto some = batch.without_columns();
  for (const auto column : columns) batch.give(some, column);
  return some;
}

WorkerData numbers_of(const Metrics& metrics) {
  WorkerData answer;
  answer.meta_info = metrics;
  return answer;
}

bool recomputes_log_probs(const PpoConfig& config) {
  return !config.algorithm.rollout_correction.bypass_mode && !config.takes_old_log_prob();
}

}  // namespace

BatchWorker::BatchWorker(const PpoConfig& config,
                         const PromptEncoder& encoder,
                         const models::World& world,
                         PpoWorkers& workers,
                         std::int64_t step)
    : config_(config), encoder_(encoder), workers_(workers) {
  const auto rank = config.actor.ranks.empty() ? world.size() - 1 : config.actor.ranks.back();
  dispatch_ = {.takes_part = world.rank() == rank, .whole = true, .is_collect = true};
  add_methods();
  const auto& trainer = config.trainer;
  if (!dispatch_.takes_part || !trainer.log_samples) return;
  const std::filesystem::path folder = trainer.run.default_local_dir;
  const auto samples = [&](const std::string& given, const char* usual) {
    return std::make_unique<SampleLog>(
        given.empty() ? folder / usual : std::filesystem::path(given), first_logged_step(step));
  };
  rollouts_ = samples(trainer.rollout_data_dir, kRolloutDataFolder);
  validations_ = samples(trainer.validation_data_dir, kValidationDataFolder);
}

void BatchWorker::add(const std::string& name,
                      const std::string& phase,
                      WorkerGroup::Method method) {
  workers_.add(name, {.name = phase}, dispatch_, std::move(method));
}

void BatchWorker::add_methods() {
  add("compare_log_probs", "old_log_prob", [this](const WorkerData& call) {
    const auto aggregation = config_.actor_loss_aggregation();
    Metrics metrics;
    if (recomputes_log_probs(config_)) metrics = calculate_debug_metrics(call.batch);
    metrics["actor/entropy"] =
        compute_entropy(call.batch, aggregation.loss_agg_mode, aggregation.loss_scale_factor);
    return numbers_of(metrics);
  });
  add("compute_advantages", "adv", [this](const WorkerData& call) {
    KlController kl(config_.algorithm.kl_ctrl);
    kl.restore(call.meta_info.at("kl_coef"));
    Metrics metrics;
    auto batch = call.batch;
    add_advantages(batch, config_, kl, metrics);
    WorkerData answer;
    answer.meta_info = {{"kl_coef", kl.value()}, {"metrics", metrics}};
    answer.batch =
        columns_of(batch, {&RolloutBatch::response_mask, &RolloutBatch::rollout_is_weights,
                           &RolloutBatch::token_level_scores, &RolloutBatch::token_level_rewards,
                           &RolloutBatch::advantages, &RolloutBatch::returns});
    return answer;
  });
  add("compute_metrics", "metrics",
      [](const WorkerData& call) { return numbers_of(compute_data_metrics(call.batch)); });
  const auto writes = [this](const std::unique_ptr<SampleLog>& log) {
    return [this, &log](const WorkerData& call) {
      log->write(call.meta_info.at("step"), logged_samples(call.batch, encoder_));
      return WorkerData();
    };
  };
  add("write_rollouts", "samples", writes(rollouts_));
  add("write_validations", "samples", writes(validations_));
}

Metrics BatchWorker::compare_log_probs(const RolloutBatch& batch) {
  if (config_.algorithm.rollout_correction.bypass_mode) return {};
  auto asked = columns_of(batch, {&RolloutBatch::response_mask, &RolloutBatch::entropys});
  if (recomputes_log_probs(config_)) {
    batch.give(asked, &RolloutBatch::old_log_probs);
    batch.give(asked, &RolloutBatch::rollout_log_probs);
  }
  return workers_.ask("compare_log_probs", std::move(asked)).meta_info.get<Metrics>();
}

RolloutBatch BatchWorker::compute_advantages(const RolloutBatch& batch,
                                             KlController& kl,
                                             Metrics& metrics) {
  auto asked = columns_of(batch, {&RolloutBatch::response_mask, &RolloutBatch::values});
  asked.scores = batch.scores;
  asked.reward_baselines = batch.reward_baselines;
  asked.uid = batch.uid;
  asked.turn_scores = batch.turn_scores;
  const auto& algorithm = config_.algorithm;
  if (looks_at_turns(algorithm.adv_estimator)) batch.give(asked, &RolloutBatch::tokens);
  if (algorithm.use_kl_in_reward) batch.give(asked, &RolloutBatch::ref_log_prob);
  if (algorithm.use_kl_in_reward || !algorithm.rollout_correction.bypass_mode)
    batch.give(asked, &RolloutBatch::old_log_probs);
  if (!algorithm.rollout_correction.bypass_mode)
    batch.give(asked, &RolloutBatch::rollout_log_probs);
  auto answer = workers_.ask("compute_advantages", std::move(asked), {}, {{"kl_coef", kl.value()}});
  kl.restore(answer.meta_info.at("kl_coef"));
  for (const auto& [name, value] : answer.meta_info.at("metrics").get<Metrics>())
    metrics[name] = value;
  return std::move(answer.batch);
}

Metrics BatchWorker::compute_metrics(const RolloutBatch& batch) {
  auto asked = columns_of(batch, {&RolloutBatch::response_mask, &RolloutBatch::token_level_scores,
                                  &RolloutBatch::token_level_rewards, &RolloutBatch::advantages,
                                  &RolloutBatch::returns, &RolloutBatch::values});
  for (const auto& session : batch.agent_info)
    asked.agent_info.push_back({{"num_turns", session.at("num_turns")}});
  return workers_.ask("compute_metrics", std::move(asked)).meta_info.get<Metrics>();
}

void BatchWorker::write(const std::string& method, std::int64_t step, const RolloutBatch& batch) {
  if (!config_.trainer.log_samples || batch.size() == 0) return;
  auto asked = batch.only({});
  asked.scores = batch.scores;
  asked.turn_scores = batch.turn_scores;
  batch.give(asked, &RolloutBatch::global_steps);
  const auto& rejected = config_.algorithm.rollout_correction.rollout_rs;
  if (rejected.empty()) batch.give(asked, &RolloutBatch::response_mask);  // or else not of turns
  asked.ground_truth = batch.ground_truth;
  asked.reward_extra_info = batch.reward_extra_info;
  (void)workers_.ask(method, std::move(asked), {}, {{"step", step}});
}

void BatchWorker::write_rollouts(std::int64_t step, const RolloutBatch& batch) {
  write("write_rollouts", step, batch);
}

void BatchWorker::write_validations(std::int64_t step, const RolloutBatch& batch) {
  write("write_validations", step, batch);
}

}  // namespace ferry::trainer
