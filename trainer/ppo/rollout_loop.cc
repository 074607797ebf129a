#include "trainer/ppo/rollout_loop.h"

#include <ATen/ops/repeat_interleave.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "distckpt/base/error.h"
#include "trainer/agents/session_journal.h"
#include "trainer/data/permutation.h"
#include "trainer/metrics/val_metrics.h"
#include "trainer/ppo/batch_samples.h"
#include "trainer/ppo/ppo_batch.h"
#include "trainer/ppo/ppo_metrics.h"
#include "trainer/rewards/reward_score.h"
#include "trainer/run/training_run.h"
#include "trainer/workers/reward_manager.h"

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
    if (scores_by_rule(config.reward, loop))
      require_rule(example.data_source, example.reward_model.ground_truth);
    return encoder.encode(std::move(example), /*shows_tools=*/loop == AgentLoopKind::kTool);
  };
}

RolloutLoop::RolloutLoop(const PpoConfig& config,
                         const PromptEncoder& encoder,
                         RecordStream& stream,
                         PpoWorkers& workers,
                         BatchWorker& batch_worker,
                         PpoLog& log,
                         std::function<bool(std::int64_t)> is_saved,
                         std::int64_t step,
                         std::int64_t total_steps)
    : config_(config),
      encoder_(encoder),
      stream_(stream),
      workers_(workers),
      batch_worker_(batch_worker),
      log_(log),
      schedule_(config, std::move(is_saved), step, total_steps),
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
  data_before_.try_emplace(step, stream_.state().dump());
  const auto& data = config_.data;
  const auto size = config_.algorithm.filter_groups.enable
                        ? data.gen_batch_size.value_or(data.train_batch_size)
                        : data.train_batch_size;
  const auto prompts = next_prompts(stream_, size);
  Answering answering;
  answering.step = step;
  answering.epoch = stream_.cursor().epoch;
  answering.batch = rows_of(prompts, config_.rollout.n, kTraining, first, step);
  if (config_.algorithm.adv_estimator == AdvantageEstimator::kRemax)
    answering.greedy = rows_of(prompts, 1, kBaseline, 0, step);
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
  auto& asked = asked_.emplace_back();
  asked.step = step;
  asked.epoch = epoch_;
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
                                       RolloutBatch greedy,
                                       std::int64_t step) {
  generate(greedy, {.temperature = 0}, step + 1, false);
  add_rewards(greedy);
  batch.reward_baselines = at::repeat_interleave(sequence_scores(greedy), config_.rollout.n);
}

RolloutBatch RolloutLoop::next_batch(std::int64_t step) {
  const auto& filter = config_.algorithm.filter_groups;
  const bool baselines = config_.algorithm.adv_estimator == AdvantageEstimator::kRemax;
  const auto wanted = std::int64_t{config_.data.train_batch_size} * config_.rollout.n;
  schedule_.begin_step(step + 1);
  data_before_.erase(data_before_.begin(), data_before_.upper_bound(step));
  if (!call_ && (answered_.empty() || schedule_.begins_anew()))
    log_.phase("update_weights", [&] { wake(step); });
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
      log_.phase("gen_max",
                 [&] { add_reward_baselines(batch, std::move(answering.greedy), step); });
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

Record RolloutLoop::data_state(std::int64_t step) const {
  const auto found = data_before_.find(step + 1);
  return found == data_before_.end() ? stream_.state() : Record::parse(found->second);
}

// Sessions that are under way lie with the data parallel ranks that have them.
nlohmann::json RolloutLoop::settings_of_pending() const {
  auto settings = settings_of_answers(config_);
  settings["rollout_data_parallel_size"] =
      config_.async_training.partial_rollout ? workers_.num_rollout_parts() : 0;
  return settings;
}

std::int64_t RolloutLoop::save_pending(std::int64_t step) {
  PendingAnswers pending{.settings = settings_of_pending(),
                         .data = stream_.state().dump(),
                         .last_asked = last_asked_,
                         .last_drawn = last_drawn_,
                         .num_started = num_started_,
                         .epoch = epoch_,
                         .drawn = drawn_,
                         .under_way = under_way_};
  pending.data_before.assign(data_before_.upper_bound(step), data_before_.end());
  pending.answered.assign(answered_.begin(), answered_.end());
  if (pending.num_rows() == 0) return 0;
  if (under_way_.size() > 0) pending.sessions = workers_.carried_sessions();
  write_pending(config_.trainer.run.default_local_dir, step, pending,
                [&](const RolloutBatch& rows) { return workers_.gather_rows(rows); });
  return pending.num_rows();
}

// The sessions go on beside the prompts that they began with.
void RolloutLoop::carry_sessions(const RolloutBatch& sessions) {
  std::map<std::int64_t, std::int64_t> rows_of_seeds;
  for (std::int64_t row = 0; row < under_way_.size(); ++row)
    rows_of_seeds.emplace(under_way_.seeds[row].item<std::int64_t>(), row);
  RolloutBatch::Rows rows;
  for (const auto& session : sessions.session) {
    const auto found = rows_of_seeds.find(session.at("seed").get<std::int64_t>());
    require(found != rows_of_seeds.end(), ErrorKind::kCorrupt,
            "pending answers: session {} is of no prompt", session.at("seed").dump());
    rows.push_back(found->second);
  }
  workers_.carry_sessions(under_way_.select(rows), sessions);
}

void RolloutLoop::restore_pending(const std::filesystem::path& run, std::int64_t step) {
  const auto leave_out = [&](const std::string& why) {
    log_.say(fmt::format("left out   answers that were pending behind step {}: {}", step, why));
  };
  std::optional<PendingReader> file;
  try {
    file.emplace(run, step);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kNotFound) throw;
    return leave_out(error.what());
  }
  const auto& then = file->description().settings;
  if (const auto now = settings_of_pending(); then != now) {
    std::set<std::string> others;
    for (const auto& settings : {then, now})
      for (const auto& [name, value] : settings.items())
        if (now.value(name, nlohmann::json()) != then.value(name, nlohmann::json()))
          others.insert(name);
    return leave_out(fmt::format("they are those of another {}", fmt::join(others, ", ")));
  }
  try {
    take_up(*file);
  } catch (const nlohmann::json::exception& error) {
    fail(ErrorKind::kCorrupt, "{}: pending answers behind step {}: {}", run.string(), step,
         error.what());
  }
}

// Batches that are answered leave one by one.
void RolloutLoop::take_up(PendingReader& file) {
  const auto& pending = file.description();
  stream_.restore(Record::parse(pending.data));
  data_before_.clear();
  for (const auto& [of, data] : pending.data_before) data_before_.emplace(of, data);
  last_asked_ = pending.last_asked;
  last_drawn_ = pending.last_drawn;
  num_started_ = pending.num_started;
  epoch_ = pending.epoch;
  for (const auto& one : pending.answered) {
    auto& answering = answered_.emplace_back();
    answering.step = one.step;
    answering.epoch = one.epoch;
    answering.batch = file.next_rows();
    answering.greedy = file.next_rows();
    log_.write_sessions(answering.step, false, answering.batch);
    leave(answering.batch);
    answering.has_left = true;
  }
  drawn_ = file.next_rows();
  under_way_ = file.next_rows();
  if (const auto sessions = file.next_rows(); sessions.size() > 0) carry_sessions(sessions);
}

Metrics RolloutLoop::validate(std::int64_t step) {
  auto records = open_records(config_.data, config_.trainer.run, /*training=*/false);
  const auto& kwargs = config_.rollout.val_kwargs;
  const Sampling sampling{
      .temperature = kwargs.temperature, .top_k = kwargs.top_k, .top_p = kwargs.top_p};
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
