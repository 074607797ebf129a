#include "trainer/ppo/rollout_loop.h"

#include <ATen/ops/repeat_interleave.h>
#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>
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

Sampling training_sampling(const PpoConfig& config) {
  return {.temperature = config.rollout.temperature,
          .top_k = config.rollout.top_k,
          .top_p = config.rollout.top_p,
          .entropy = config.takes_old_log_prob(),
          .sampling_mask = config.rollout.truncates(),
          .routed_experts = config.actor.router_replay.mode == RouterReplayMode::kR3};
}

}  // namespace

PromptParser prompt_parser(const PromptEncoder& encoder, const PpoConfig& config) {
  return [&](const Record& record) {
    auto example = parse_prompt(record, config.data.prompt_key, config.data.image_key);
    const auto loop = config.rollout.agents.loop_of(example.agent_name);
    require(example.images.empty() || loop != AgentLoopKind::kProgram, ErrorKind::kUsage,
            "prompt: has images, which programs of program_agent do not take");
    return encoder.encode(std::move(example), /*shows_tools=*/loop == AgentLoopKind::kTool);
  };
}

RolloutLoop::RolloutLoop(const PpoConfig& config,
                         const PromptEncoder& encoder,
                         RecordStream& stream,
                         PpoWorkers& workers,
                         BatchWorker& batch_worker,
                         PpoLog& log,
                         std::function<bool(std::int64_t)> ends_ahead,
                         std::int64_t step)
    : config_(config),
      encoder_(encoder),
      stream_(stream),
      workers_(workers),
      batch_worker_(batch_worker),
      log_(log),
      schedule_(config, std::move(ends_ahead), step),
      last_asked_(step),
      last_drawn_(step),
      num_started_(step * config.data.train_batch_size) {}

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
  auto prompts = records.next_batch(size, prompt_parser(encoder_, config_));
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
                             .keeps_images = encoder_.image_reader().has_value(),
                             .key = key});
  const auto& replay_dir = config_.rollout.agents.agent.replay_dir;
  const bool validates = draw == kValidation;  // behind the step before
  const auto begun = validates ? step - 1 : step;
  // Partial rollouts begin with prompts of the next batch, too, and finish them when they do.
  const bool waits = config_.async_training.partial_rollout && !validates;
  if (!replay_dir.empty())
    add_replay(batch, replay_dir, waits ? begun - 1 : begun,
               waits ? begun + config_.max_staleness() : begun, validates);
  return batch;
}

RolloutLoop::Answering RolloutLoop::draw(std::int64_t step, std::int64_t first) {
  Answering answering{.step = step,
                      .prompts = next_prompts(stream_, config_.data.train_batch_size)};
  answering.epoch = stream_.cursor().epoch;
  answering.batch = rows_of(answering.prompts, config_.rollout.n, kTraining, first, step);
  return answering;
}

void RolloutLoop::start(std::int64_t step, std::int64_t first, std::int64_t count) {
  last_asked_ = std::max(last_asked_, step + count - 1);
  if (config_.async_training.partial_rollout) return start_partial(step);
  std::vector<RolloutBatch> batches;
  for (std::int64_t i = 0; i < count; ++i)
    batches.push_back(asked_.emplace_back(draw(step + i, first)).batch);
  call_ = workers_.start_generating(RolloutBatch::concat(batches), training_sampling(config_));
}

void RolloutLoop::start_partial(std::int64_t step) {
  const auto prompts = schedule_.prompts_until(step);
  const auto rows = (prompts - std::exchange(num_started_, prompts)) * config_.rollout.n;
  while (drawn_.size() < rows) {
    auto more = draw(++last_drawn_, 0);
    epoch_ = more.epoch;
    drawn_ = RolloutBatch::concat(std::vector{std::move(drawn_), std::move(more.batch)});
  }
  const auto begun = drawn_.slice(0, rows);
  drawn_ = drawn_.slice(rows, drawn_.size());
  under_way_ = RolloutBatch::concat(std::vector{std::move(under_way_), begun});
  asked_.push_back({.step = step, .epoch = epoch_});
  auto sampling = training_sampling(config_);
  sampling.num_groups = config_.data.train_batch_size;
  sampling.must_finish = step - 1 - config_.max_staleness();
  sampling.learned_at = step;
  call_ = workers_.start_generating(begun, sampling);
}

// The rows that are answered, in the order in which they began.
RolloutBatch RolloutLoop::taken_from_under_way(const RolloutBatch& answer) {
  std::map<std::int64_t, std::int64_t> rows_of_seeds;
  for (std::int64_t row = 0; row < answer.size(); ++row)
    rows_of_seeds.emplace(answer.seeds[row].item<std::int64_t>(), row);
  RolloutBatch::Rows taken, left, order;
  for (std::int64_t row = 0; row < under_way_.size(); ++row) {
    const auto found = rows_of_seeds.find(under_way_.seeds[row].item<std::int64_t>());
    (found == rows_of_seeds.end() ? left : taken).push_back(row);
    if (found != rows_of_seeds.end()) order.push_back(found->second);
  }
  auto batch = under_way_.select(taken);
  batch.take(answer.select(order));
  under_way_ = under_way_.select(left);
  return batch;
}

void RolloutLoop::finish() {
  if (!call_) return;
  const auto answer = workers_.finish_generating(*std::exchange(call_, {}));
  log_.add_spans(workers_.take_spans());
  std::int64_t begin = 0;
  for (auto& one : std::exchange(asked_, {})) {
    if (config_.async_training.partial_rollout) {
      one.batch = taken_from_under_way(answer);
    } else {
      const auto end = begin + one.batch.size();
      one.batch.take(answer.slice(std::exchange(begin, end), end));
    }
    log_.write_sessions(one.step, false, one.batch);
    answered_.push_back(std::move(one));
  }
}

void RolloutLoop::generate(RolloutBatch& batch,
                           const Sampling& sampling,
                           std::int64_t step,
                           bool validates) {
  batch.take(workers_.finish_generating(workers_.start_generating(batch, sampling)));
  log_.add_spans(workers_.take_spans());
  log_.write_sessions(step, validates, batch);
}

void RolloutLoop::leave(RolloutBatch& batch) {
  batch.take(workers_.keep_rows(batch));
}

// Until the rollout has answered its ranks are in no other call: they have no other role.
void RolloutLoop::answer_ahead(std::int64_t step, RolloutBatch& batch, bool has_left) {
  const auto last = schedule_.last_batch();
  if (call_ || last <= last_asked_) return;
  if (!has_left) leave(batch);
  for (auto& one : answered_)
    if (!std::exchange(one.has_left, true)) leave(one.batch);
  if (schedule_.syncs_weights()) log_.phase("update_weights", [&] { wake(step); });
  sleep();
  start(last_asked_ + 1, 0, last - last_asked_);
}

// A reward model's score comes on top.
void RolloutLoop::add_rewards(RolloutBatch& batch) {
  const auto rewards = config_.reward.scores_early() ? batch : workers_.compute_reward(batch);
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
  schedule_.begin_step(step + 1);
  if (!call_ && answered_.empty()) log_.phase("update_weights", [&] { wake(step); });
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
      finish();
      if (answered_.empty()) {
        start(step + 1, batches, 1);
        finish();
      }
      answering = std::move(answered_.front());
      answered_.pop_front();
    });
    log_.metrics()["training/epoch"] = static_cast<double>(answering.epoch);
    auto& batch = answering.batch;
    if (!filter.enable && !baselines)  // the rollout is not asked again
      answer_ahead(step, batch, answering.has_left);
    log_.phase("reward", [&] { add_rewards(batch); });
    if (baselines)
      log_.phase("gen_max", [&] { add_reward_baselines(batch, answering.prompts, step); });
    if (filter.enable) batch = varied_groups(batch, filter.metric);
    all = RolloutBatch::concat(std::vector{std::move(all), std::move(batch)});
  }
  answer_ahead(step, all, false);
  sleep();
  if (filter.enable) log_.metrics()["train/num_gen_batches"] = static_cast<double>(batches);
  if (all.size() > wanted) all = all.slice(0, wanted);
  log_.metrics().merge(staleness_metrics(all, step, config_.max_staleness(),
                                         config_.async_training.partial_rollout));
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
