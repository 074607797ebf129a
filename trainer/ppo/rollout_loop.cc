#include "trainer/ppo/rollout_loop.h"

#include <ATen/ops/repeat_interleave.h>
#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "distckpt/base/error.h"
#include "trainer/agents/session_journal.h"
#include "trainer/data/permutation.h"
#include "trainer/metrics/val_metrics.h"
#include "trainer/ppo/batch_samples.h"
#include "trainer/ppo/ppo_batch.h"
#include "trainer/ppo/ppo_metrics.h"
#include "trainer/run/training_run.h"

namespace ferry::trainer {
namespace {

// Purposes of draws: each has its own.
enum Draw : std::uint64_t { kTraining, kBaseline, kValidation };

}  // namespace

PromptParser prompt_parser(const PromptEncoder& encoder, const PpoDataConfig& data) {
  return [&encoder, &data](const Record& record) {
    return encoder.encode(parse_prompt(record, data.prompt_key));
  };
}

RolloutLoop::RolloutLoop(const PpoConfig& config,
                         const PromptEncoder& encoder,
                         RecordStream& stream,
                         PpoWorkers& workers,
                         BatchWorker& batch_worker,
                         PpoLog& log,
                         std::function<bool(std::int64_t)> ends_ahead)
    : config_(config),
      encoder_(encoder),
      stream_(stream),
      workers_(workers),
      batch_worker_(batch_worker),
      log_(log),
      ends_ahead_(std::move(ends_ahead)) {}

void RolloutLoop::wake(std::int64_t step) {
  if (awake_) return;
  workers_.update_weights(step);
  awake_ = true;
}

void RolloutLoop::sleep() {
  if (!awake_) return;
  workers_.sleep_rollout();
  awake_ = false;
}

std::vector<EncodedPrompt> RolloutLoop::next_prompts(RecordStream& records, int size) const {
  auto prompts = records.next_batch(size, prompt_parser(encoder_, config_.data));
  for (const auto& row : records.newly_malformed())
    log_.say(fmt::format("skipped    {}", row.describe()));
  return prompts;
}

RolloutBatch RolloutLoop::rows_of(std::span<const EncodedPrompt> prompts,
                                  std::int64_t n,
                                  std::uint64_t draw,
                                  std::int64_t first,
                                  std::int64_t step) const {
  const auto seed = mix64(static_cast<std::uint64_t>(config_.trainer.run.seed));
  const auto key = derive(derive(derive(seed, draw), static_cast<std::uint64_t>(step)),
                          static_cast<std::uint64_t>(first));
  auto batch = prompt_batch(prompts, config_.data,
                            {.n = n,
                             .uid_prefix = fmt::format("{}-{}-", step, first),
                             .keeps_messages = config_.rollout.agents.enabled(),
                             .key = key});
  const auto& replay_dir = config_.rollout.agents.agent.replay_dir;
  const bool validates = draw == kValidation;  // behind the step before
  if (!replay_dir.empty()) add_replay(batch, replay_dir, validates ? step - 1 : step, validates);
  return batch;
}

RolloutLoop::Answering RolloutLoop::start(std::int64_t step, std::int64_t first) {
  Answering answering{.step = step,
                      .prompts = next_prompts(stream_, config_.data.train_batch_size)};
  answering.epoch = stream_.cursor().epoch;
  answering.batch = rows_of(answering.prompts, config_.rollout.n, kTraining, first, step);
  answering.call = workers_.start_generating(
      answering.batch,
      {.temperature = config_.rollout.temperature,
       .top_k = config_.rollout.top_k,
       .top_p = config_.rollout.top_p,
       .entropy = config_.takes_old_log_prob(),
       .sampling_mask = config_.rollout.truncates(),
       .routed_experts = config_.actor.router_replay.mode == RouterReplayMode::kR3});
  return answering;
}

void RolloutLoop::finish(Answering& answering) {
  if (!answering.call) return;
  answering.batch.take(workers_.finish_generating(*std::exchange(answering.call, {})));
  log_.write_sessions(answering.step, false, answering.batch);
}

void RolloutLoop::generate(RolloutBatch& batch,
                           const Sampling& sampling,
                           std::int64_t step,
                           bool validates) {
  batch.take(workers_.finish_generating(workers_.start_generating(batch, sampling)));
  log_.write_sessions(step, validates, batch);
}

// Until the rollout has answered its ranks are in no other call: they have no other role.
void RolloutLoop::answer_ahead(std::int64_t step, RolloutBatch& batch) {
  if (!config_.trainer.one_step_off || ahead_ || ends_ahead_(step + 1)) return;
  batch.take(workers_.keep_rows(batch));
  log_.phase("update_weights", [&] { wake(step); });
  sleep();
  ahead_ = start(step + 2, 0);
}

// A reward model's score comes on top.
void RolloutLoop::add_rewards(RolloutBatch& batch) {
  const auto rewards = workers_.compute_reward(batch);
  auto scores = rewards.scores;
  batch.reward_extra_info = rewards.reward_extra_info;
  if (config_.reward.enable) {
    scores = scores + workers_.compute_rm_score(batch).scores.to(at::kFloat);
    for (std::size_t row = 0; row < batch.reward_extra_info.size(); ++row)
      batch.reward_extra_info[row]["score"] = scores[static_cast<std::int64_t>(row)].item<double>();
  }
  batch.scores = scores + rewards.overlong_reward;
  if (config_.rollout.agents.enabled()) add_session_info(batch);
}

// Adds what the greedy response to each prompt earns (ReMax).
void RolloutLoop::add_reward_baselines(RolloutBatch& batch,
                                       std::span<const EncodedPrompt> prompts,
                                       std::int64_t step) {
  auto greedy = rows_of(prompts, 1, kBaseline, 0, step + 1);
  generate(greedy, {.temperature = 0}, step + 1, false);
  add_rewards(greedy);
  batch.reward_baselines = at::repeat_interleave(sequence_scores(greedy), config_.rollout.n);
}

RolloutBatch RolloutLoop::next_batch(std::int64_t step) {
  const auto& filter = config_.algorithm.filter_groups;
  const bool baselines = config_.algorithm.adv_estimator == AdvantageEstimator::kRemax;
  const auto wanted = std::int64_t{config_.data.train_batch_size} * config_.rollout.n;
  if (!ahead_) log_.phase("update_weights", [&] { wake(step); });
  RolloutBatch all;
  std::int64_t batches = 0;
  for (; all.size() < wanted; ++batches) {
    require(
        filter.max_num_gen_batches == 0 || !filter.enable || batches < filter.max_num_gen_batches,
        ErrorKind::kUsage,
        "algorithm.filter_groups: {} of {} groups differ in {} after {} batches of prompts "
        "(max_num_gen_batches): the data may be too hard, or too easy",
        all.size() / config_.rollout.n, config_.data.train_batch_size, filter.metric, batches);
    Answering answering;
    log_.phase("gen", [&] {
      answering = ahead_ ? *std::exchange(ahead_, {}) : start(step + 1, batches);
      finish(answering);
    });
    log_.metrics()["training/epoch"] = static_cast<double>(answering.epoch);
    auto& batch = answering.batch;
    if (!filter.enable && !baselines) answer_ahead(step, batch);  // the rollout is not asked again
    log_.phase("reward", [&] { add_rewards(batch); });
    if (baselines)
      log_.phase("gen_max", [&] { add_reward_baselines(batch, answering.prompts, step); });
    if (filter.enable) batch = varied_groups(batch, filter.metric);
    all = RolloutBatch::concat(std::vector{std::move(all), std::move(batch)});
  }
  answer_ahead(step, all);
  sleep();
  if (filter.enable) log_.metrics()["train/num_gen_batches"] = static_cast<double>(batches);
  if (all.size() > wanted) all = all.slice(0, wanted);
  log_.metrics().merge(staleness_metrics(all, step, config_.trainer.one_step_off ? 1 : 0));
  return all;
}

Metrics RolloutLoop::validate(std::int64_t step) {
  auto records = open_records(config_.data, config_.trainer.run, /*training=*/false);
  const auto& kwargs = config_.rollout.val_kwargs;
  const Sampling sampling{.temperature = kwargs.do_sample ? kwargs.temperature : 0,
                          .top_k = kwargs.top_k,
                          .top_p = kwargs.top_p};
  const auto batch_size =
      config_.data.val_batch_size.value_or(static_cast<int>(records.num_records()));
  std::vector<ValidationSample> samples;
  RolloutBatch all;
  for (std::int64_t batches = 0; records.cursor().epoch == 0; ++batches) {
    const auto prompts = next_prompts(records, batch_size);
    if (prompts.empty()) continue;
    auto batch = rows_of(prompts, kwargs.n, kValidation, batches, step + 1);
    generate(batch, sampling, step, true);
    add_rewards(batch);
    std::ranges::move(validation_samples(batch), std::back_inserter(samples));
    all = RolloutBatch::concat(std::vector{std::move(all), std::move(batch)});
  }
  batch_worker_.write_validations(step, all);
  auto metrics = validation_metrics(samples);
  metrics["val/malformed_rows"] = static_cast<double>(records.malformed().count);
  return metrics;
}

}  // namespace ferry::trainer
