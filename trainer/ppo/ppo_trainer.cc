#include "trainer/ppo/ppo_trainer.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/repeat_interleave.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

#include "converter/convert.h"
#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"
#include "models/device/device.h"
#include "trainer/algorithms/agg_loss.h"
#include "trainer/data/permutation.h"
#include "trainer/engine/finite_outputs.h"
#include "trainer/engine/run_options.h"
#include "trainer/metrics/performance.h"
#include "trainer/metrics/progress_line.h"
#include "trainer/metrics/run_log.h"
#include "trainer/ppo/ppo_batch.h"
#include "trainer/ppo/ppo_metrics.h"
#include "trainer/run/training_run.h"
#include "trainer/update/ppo_options.h"
#include "trainer/workers/batch_samples.h"
#include "trainer/workers/role.h"

namespace ferry::trainer {
namespace {

// What draws are for: each has its own.
enum Draw : std::uint64_t { kTraining, kBaseline, kValidation };

bool every(std::int64_t step, int frequency) {
  return frequency > 0 && step % frequency == 0;
}

}  // namespace

PpoTrainer::PpoTrainer(const PpoConfig& config, models::World& world, PpoOutput output)
    : config_(config),
      world_(world),
      output_(std::move(output)),
      origin_(open_checkpoint(config.model)),
      encoder_(tokenizer_folder(config.model, *origin_), encoder_options(config.data)),
      stream_(open_records(config.data, config.trainer.run, /*training=*/true)),
      total_steps_(total_training_steps(config.trainer.run,
                                        "data.train_batch_size",
                                        config.data.train_batch_size,
                                        [&] { return count_records(world, stream_, parser()); })),
      start_(ppo_start(config)),
      workers_(world, config, origin_, encoder_, total_steps_),
      kl_(kl_control(config.algorithm.kl_ctrl)),
      peak_flops_(peak_flops(models::device_name(world.device()))) {
  const auto& run = config.trainer.run;
  const std::filesystem::path folder = run.default_local_dir;
  step_ = start_.step;
  const auto first = first_logged_step(step_);
  workers_.begin_timeline(folder / kTimelineFolder, first);
  if (world.rank() != 0) return;
  output_.say(fmt::format("loaded     {}", config_.model.path));
  timeline_ = std::make_unique<Timeline>(folder / kTimelineFolder, 0, first);
  distckpt::write_text(folder / kConfigFile, to_toml(config));
  logs_ = open_logs(run, first);
  const auto samples = [&](const std::string& given, const char* usual) {
    return std::make_unique<SampleLog>(
        given.empty() ? folder / usual : std::filesystem::path(given), first);
  };
  if (config.trainer.log_samples) {
    rollout_log_ = samples(config.trainer.rollout_data_dir, kRolloutDataFolder);
    validation_log_ = samples(config.trainer.validation_data_dir, kValidationDataFolder);
  }
}

PpoTrainer::~PpoTrainer() = default;

void PpoTrainer::run() {
  if (world_.rank() != 0) return workers_.serve();
  fit();
  workers_.group().stop();
}

void PpoTrainer::fit() {
  for (const auto& line : describe(workers_.meshes())) output_.say(line);
  resume();
  ProgressLine progress(total_steps_);
  const auto& run = config_.trainer.run;
  const bool console = logs_to(run, Logger::kConsole);
  const bool validates = !config_.data.val_files.empty();
  if (step_ == 0 && run.val_before_train && validates) {
    wake_rollout();
    report(validate());
  }
  while (step_ < total_steps_) {
    auto metrics = train_step();
    report(metrics);
    if (console)
      output_.say(progress.format({.step = step_, .time = wall_time(), .values = metrics}));
    // Behind its numbers: a run that dies before both are written does the step again.
    if (saves_behind(step_)) {
      phase("save_checkpoint", [&] { save(); });
      report({{"timing_s/save_checkpoint", timeline_->end_step().at("save_checkpoint")}});
    } else {
      finish_save(/*wait=*/false);  // tells of a save that failed without waiting for the next
    }
  }
  finish_save();
}

bool PpoTrainer::saves_behind(std::int64_t step) const {
  const auto frequency = config_.checkpoint.save_freq;
  return every(step, frequency) || (step == total_steps_ && frequency > 0);
}

void PpoTrainer::resume() {
  if (step_ == 0) return;
  const auto load = [&](const std::string& role) {
    return tell(
        role + "/load_checkpoint",
        {{"root", start_.run.empty() ? "" : (start_.run / role).string()}, {"global_step", step_}});
  };
  const auto caller = load("actor").meta_info.at("caller");
  if (config_.use_critic()) (void)load("critic");
  stream_.restore(Record::parse(caller.at("data").get<std::string>()));
  kl_.restore(std::stod(caller.at("kl_coef").get<std::string>()));
  output_.say(fmt::format("resumed    after step {}", step_));
}

void PpoTrainer::save() {
  finish_save();
  sleep_rollout();  // the actor's weights may rest where it is awake
  const nlohmann::json call{
      {"global_step", step_},
      {"async", config_.checkpoint.async_save},
      {"caller", {{"data", stream_.state().dump()}, {"kl_coef", fmt::format("{}", kl_.value())}}}};
  if (config_.use_critic()) (void)tell("critic/save_checkpoint", call);
  (void)tell("actor/save_checkpoint", call);
  if (!config_.checkpoint.async_save) export_hf();
  output_.say(
      fmt::format("saved      step {} to {}", step_, config_.trainer.run.default_local_dir));
}

void PpoTrainer::export_hf() const {
  if (config_.checkpoint.save_hf)
    save_hf(std::filesystem::path(config_.trainer.run.default_local_dir) / "actor",
            config_.model.hf_config_path);
}

void PpoTrainer::finish_save(bool wait) {
  if (!config_.checkpoint.async_save) return;
  const nlohmann::json call{{"wait", wait}};
  if (config_.use_critic()) (void)tell("critic/finish_save", call);
  if (tell("actor/finish_save", call).meta_info.at("saved").get<bool>()) export_hf();
}

DataProto PpoTrainer::ask(const std::string& method,
                          const DataProto& batch,
                          const std::vector<std::string>& columns) {
  auto data = batch.select(columns);
  data.meta_info["global_step"] = step_ + 1;
  return workers_.group().call(method, data);
}

DataProto PpoTrainer::ask_balanced(const std::string& method,
                                   const DataProto& batch,
                                   const std::vector<std::string>& columns,
                                   std::int64_t mini_batch) {
  const auto dp = workers_.group().num_parts(method);
  if (mini_batch % dp != 0) return ask(method, batch, columns);
  const auto order = mini_batches_of_ranks(batch, mini_batch, dp, config_.trainer.balance_batch);
  const auto answer = ask(method, batch.reorder(order), columns);
  return answer.size() > 0 ? answer.reorder(inverse_order(order)) : answer;
}

DataProto PpoTrainer::tell(const std::string& method, nlohmann::json meta_info) {
  DataProto data;
  data.meta_info = std::move(meta_info);
  return workers_.group().call(method, data);
}

template <typename Body>
void PpoTrainer::phase(const char* name, Body&& body) {
  const auto span = timeline_->span(name);
  body();
  models::synchronize(world_.device());
}

void PpoTrainer::wake_rollout() {
  if (awake_) return;
  (void)tell("update_weights", {{"weights_step", step_}});
  awake_ = true;
}

void PpoTrainer::sleep_rollout() {
  if (!awake_) return;
  (void)tell("sleep_rollout");
  awake_ = false;
}

WorkerGroup::Call PpoTrainer::start_generating(const DataProto& prompts, const Sampling& sampling) {
  auto asked = prompts.select(std::vector<std::string>{"prompts", "attention_mask", "seeds"});
  asked.meta_info = {{"global_step", step_ + 1},
                     {"temperature", sampling.temperature},
                     {"top_k", sampling.top_k},
                     {"top_p", sampling.top_p},
                     {"entropy", sampling.entropy},
                     {"routed_experts", sampling.routed_experts},
                     {"sampling_mask", sampling.sampling_mask}};
  return workers_.group().start("generate_sequences", asked);
}

DataProto PpoTrainer::generate(const DataProto& prompts, const Sampling& sampling) {
  return with_answers(prompts, workers_.group().finish(start_generating(prompts, sampling)));
}

DataProto PpoTrainer::rows_of(std::span<const EncodedPrompt> prompts,
                              std::int64_t n,
                              std::uint64_t draw,
                              std::int64_t first,
                              std::int64_t step) const {
  const auto seed = mix64(static_cast<std::uint64_t>(config_.trainer.run.seed));
  const auto key = derive(derive(derive(seed, draw), static_cast<std::uint64_t>(step)),
                          static_cast<std::uint64_t>(first));
  return prompt_batch(prompts, {.n = n,
                                .width = config_.data.max_prompt_length,
                                .uid_prefix = fmt::format("{}-{}-", step, first),
                                .key = key});
}

std::function<EncodedPrompt(const Record&)> PpoTrainer::parser() const {
  return [this](const Record& record) {
    return encoder_.encode(parse_prompt(record, config_.data.prompt_key));
  };
}

std::vector<EncodedPrompt> PpoTrainer::next_prompts(RecordStream& records, int size) const {
  auto prompts = records.next_batch(size, parser());
  for (const auto& row : records.newly_malformed())
    output_.say(fmt::format("skipped    {}", row.describe()));
  return prompts;
}

// A reward model's score comes on top.
void PpoTrainer::add_rewards(DataProto& batch) {
  const auto rewards =
      ask("compute_reward", batch,
          {"responses", "response_mask", "data_source", "ground_truth", "extra_info"});
  auto scores = rewards.tensor("scores");
  auto extras = rewards.column("reward_extra_info");
  if (config_.reward.enable) {
    scores = scores + ask("compute_rm_score", batch, {"prompts", "responses", "attention_mask"})
                          .tensor("rm_scores")
                          .to(at::kFloat);
    for (std::size_t row = 0; row < extras.size(); ++row)
      extras[row]["score"] = scores[static_cast<std::int64_t>(row)].item<double>();
  }
  scores = scores + rewards.tensor("overlong_reward");
  batch.set("reward_extra_info", std::move(extras));
  batch.set("token_level_scores", at_last_token(scores, batch.tensor("response_mask")));
}

// What the greedy answer to each prompt earns (ReMax).
void PpoTrainer::add_reward_baselines(DataProto& batch, std::span<const EncodedPrompt> prompts) {
  auto greedy = generate(rows_of(prompts, 1, kBaseline, 0, step_ + 1), {.temperature = 0});
  add_rewards(greedy);
  batch.set("reward_baselines",
            at::repeat_interleave(greedy.tensor("token_level_scores").sum(1), config_.rollout.n));
}

PpoTrainer::Answering PpoTrainer::start_answering(std::int64_t step, std::int64_t first) {
  Answering answering{.prompts = next_prompts(stream_, config_.data.train_batch_size)};
  answering.epoch = stream_.cursor().epoch;
  answering.rows = rows_of(answering.prompts, config_.rollout.n, kTraining, first, step);
  answering.call = start_generating(
      answering.rows,
      {.temperature = config_.rollout.temperature,
       .top_k = config_.rollout.top_k,
       .top_p = config_.rollout.top_p,
       .entropy = config_.takes_old_log_prob(),
       .sampling_mask = config_.rollout.truncates(),
       .routed_experts = config_.actor.router_replay.mode == RouterReplayMode::kR3});
  return answering;
}

void PpoTrainer::finish_answering(Answering& answering) {
  if (!answering.call) return;
  answering.rows =
      with_answers(answering.rows, workers_.group().finish(*std::exchange(answering.call, {})));
}

// Until the rollout has answered its ranks are in no other call: they have no other role.
void PpoTrainer::answer_ahead() {
  const auto next = step_ + 1;  // the step that begins
  if (!config_.trainer.one_step_off || ahead_ || next == total_steps_ || saves_behind(next)) return;
  phase("update_weights", [&] { wake_rollout(); });
  sleep_rollout();
  ahead_ = start_answering(next + 1, 0);
}

DataProto PpoTrainer::answered_batch(Metrics& metrics) {
  const auto& filter = config_.algorithm.filter_groups;
  const bool baselines = config_.algorithm.adv_estimator == AdvantageEstimator::kRemax;
  const auto wanted = std::int64_t{config_.data.train_batch_size} * config_.rollout.n;
  DataProto all;
  std::int64_t batches = 0;
  while (all.size() < wanted) {
    require(
        filter.max_num_gen_batches == 0 || !filter.enable || batches < filter.max_num_gen_batches,
        ErrorKind::kUsage,
        "algorithm.filter_groups: {} of {} groups differ in {} after {} batches of prompts "
        "(max_num_gen_batches): the data may be too hard, or too easy",
        all.size() / config_.rollout.n, config_.data.train_batch_size, filter.metric, batches);
    Answering answering;
    phase("gen", [&] {
      answering = ahead_ ? *std::exchange(ahead_, {}) : start_answering(step_ + 1, batches);
      finish_answering(answering);
    });
    metrics["training/epoch"] = static_cast<double>(answering.epoch);
    auto& batch = answering.rows;
    if (!filter.enable && !baselines) answer_ahead();  // the rollout is not asked again
    phase("reward", [&] { add_rewards(batch); });
    if (baselines) phase("gen_max", [&] { add_reward_baselines(batch, answering.prompts); });
    if (filter.enable) batch = varied_groups(batch, filter.metric);
    if (batch.size() > 0)
      all = all.size() == 0 ? batch : DataProto::concat(std::vector{all, batch});
    ++batches;
  }
  answer_ahead();
  if (filter.enable) metrics["train/num_gen_batches"] = static_cast<double>(batches);
  return all.size() > wanted ? all.slice(0, wanted) : all;
}

void PpoTrainer::add_log_probs(DataProto& batch, Metrics& metrics) {
  const std::vector<std::string> columns{"prompts", "responses", "attention_mask"};
  batch.meta_info["temperature"] = config_.rollout.temperature;
  const auto of_ref = with_given(columns, batch, {"sampling_mask"});
  const auto of_actor = with_given(of_ref, batch, {"routed_experts"});
  const auto add = [&](const char* name, const char* method, const auto& asked) {
    phase(name,
          [&] { batch = batch.union_with(ask_balanced(method, batch, asked, batch.size())); });
  };
  const bool bypasses = config_.algorithm.rollout_correction.bypass_mode;
  if (bypasses || config_.takes_old_log_prob()) {
    batch.set("old_log_probs", batch.tensor("rollout_log_probs"));
  } else {
    add("old_log_prob", "compute_log_prob", of_actor);
    for (const auto& [name, value] : calculate_debug_metrics(batch)) metrics[name] = value;
  }
  const auto aggregation = config_.actor_loss_aggregation();
  if (!bypasses)
    metrics["actor/entropy"] =
        compute_entropy(batch, aggregation.loss_agg_mode, aggregation.loss_scale_factor);
  if (config_.use_reference_policy()) add("ref", "compute_ref_log_prob", of_ref);
  if (config_.use_critic()) add("values", "compute_values", columns);
}

void PpoTrainer::learn(DataProto& batch, Metrics& metrics) {
  const auto seed = mix64(static_cast<std::uint64_t>(config_.actor.data_loader_seed));
  const auto update = [&](const char* method, const MiniBatches& mini_batches,
                          std::vector<std::string> columns) {
    for (const char* shared : {"prompts", "responses", "attention_mask", "response_mask"})
      columns.emplace_back(shared);
    std::string not_finite;
    phase(method, [&] {
      const auto rows = mini_batches.shuffle
                            ? shuffled_epochs(batch.select(columns), mini_batches.epochs,
                                              derive(seed, static_cast<std::uint64_t>(step_ + 1)))
                            : batch;
      const auto answer = ask_balanced(method, rows, columns, mini_batches.size).meta_info;
      for (const auto& [name, value] : answer.at("metrics").items()) metrics[name] = value;
      memory_.add(
          {.allocated = answer.at("max_memory")[0], .reserved = answer.at("max_memory")[1]});
      not_finite = answer.at("not_finite").get<std::string>();
    });
    if (!not_finite.empty())
      output_.say(fmt::format("step {}: {} skipped an update: the gradient of {} is not finite",
                              step_ + 1, method, not_finite));
    return not_finite;
  };
  std::string not_finite;
  if (config_.use_critic())
    not_finite = update("update_critic", config_.critic_mini_batches(), {"values", "returns"});
  if (step_ + 1 > config_.trainer.critic_warmup) {
    if (needs_cov_tokens(config_.actor.policy_loss.loss_mode))
      batch.set("row", at::arange(batch.size(), at::kLong));
    const auto columns = with_given(
        {"old_log_probs", "advantages"}, batch,
        {"ref_log_prob", "rollout_is_weights", "routed_experts", "sampling_mask", "row"});
    const auto there = update("update_actor", config_.actor_mini_batches(), columns);
    if (!there.empty()) not_finite = there;
  }
  not_finite_ = not_finite.empty() ? 0 : not_finite_ + 1;
  require(not_finite_ < kMostNotFinite, ErrorKind::kCorrupt,
          "{}: no finite gradient in {} steps in a row", not_finite, not_finite_);
}

Metrics PpoTrainer::train_step() {
  const auto started = wall_time();
  memory_ = {};
  timeline_->begin_step(step_ + 1);
  Metrics metrics;
  if (!ahead_) phase("update_weights", [&] { wake_rollout(); });
  auto batch = answered_batch(metrics);
  sleep_rollout();
  metrics.merge(staleness_metrics(batch, step_, config_.trainer.one_step_off ? 1 : 0));
  add_log_probs(batch, metrics);
  phase("adv", [&] { add_advantages(batch, config_, kl_, metrics); });
  learn(batch, metrics);
  ++step_;
  const auto& run = config_.trainer.run;
  const bool last = step_ == total_steps_;
  const bool validates = !config_.data.val_files.empty() &&
                         (every(step_, run.test_freq) || (last && run.test_freq > 0));
  if (validates && ahead_) phase("gen", [&] { finish_answering(*ahead_); });
  if (validates) phase("update_weights", [&] { wake_rollout(); });
  if (validates) phase("testing", [&] { metrics.merge(validate()); });
  if (rollout_log_) rollout_log_->write(step_, logged_samples(batch, encoder_));
  const auto counts = count_tokens(batch);
  const auto seconds = wall_time() - started;
  auto timing = timeline_->end_step();
  timing["step"] = seconds;
  metrics.merge(compute_data_metrics(batch));
  const auto num_actor_ranks = num_ranks(config_.actor.ranks, world_.size());
  if (peak_flops_)
    metrics.merge(mfu_metrics(batch, origin_->map.config,
                              {.seconds = timing,
                               .ppo_epochs = config_.actor.ppo_epochs,
                               .peak_flops = *peak_flops_ * num_actor_ranks}));
  metrics.merge(performance_metrics({.seconds = seconds,
                                     .tokens = counts.prompt + counts.response,
                                     .response_tokens = counts.response,
                                     .num_gpus = world_.size(),
                                     .max_memory_allocated = memory_.allocated,
                                     .max_memory_reserved = memory_.reserved,
                                     .cpu_memory_used = host_memory_used(),
                                     .timing = timing}));
  metrics["training/global_step"] = static_cast<double>(step_);
  metrics["training/malformed_rows"] = static_cast<double>(stream_.malformed().count);
  if (!config_.reward.command.empty())
    metrics["reward/num_restarts"] = static_cast<double>(workers_.num_reward_restarts());
  return metrics;
}

Metrics PpoTrainer::validate() {
  auto records = open_records(config_.data, config_.trainer.run, /*training=*/false);
  const auto& kwargs = config_.rollout.val_kwargs;
  const Sampling sampling{.temperature = kwargs.do_sample ? kwargs.temperature : 0,
                          .top_k = kwargs.top_k,
                          .top_p = kwargs.top_p};
  const auto batch_size =
      config_.data.val_batch_size.value_or(static_cast<int>(records.num_records()));
  std::vector<ValidationSample> samples;
  DataProto all;
  for (std::int64_t batches = 0; records.cursor().epoch == 0; ++batches) {
    const auto prompts = next_prompts(records, batch_size);
    if (prompts.empty()) continue;
    auto batch = generate(rows_of(prompts, kwargs.n, kValidation, batches, step_ + 1), sampling);
    add_rewards(batch);
    std::ranges::move(validation_samples(batch), std::back_inserter(samples));
    all = all.size() == 0 ? batch : DataProto::concat(std::vector{all, batch});
  }
  if (validation_log_ && all.size() > 0)
    validation_log_->write(step_, logged_samples(all, encoder_));
  auto metrics = validation_metrics(samples);
  metrics["val/malformed_rows"] = static_cast<double>(records.malformed().count);
  return metrics;
}

void PpoTrainer::report(const Metrics& metrics) {
  const StepMetrics line{.step = step_, .time = wall_time(), .values = metrics};
  for (const auto& log : logs_) log->write(line);
}

}  // namespace ferry::trainer
