#include "trainer/ppo/ppo_trainer.h"

#include <fmt/format.h>

#include <filesystem>
#include <utility>

#include "converter/convert.h"
#include "distckpt/storage/file_io.h"
#include "trainer/agents/tools.h"
#include "trainer/engine/run_options.h"
#include "trainer/engine/training_checkpoint.h"
#include "trainer/metrics/run_log.h"
#include "trainer/ppo/pending_answers.h"
#include "trainer/run/training_run.h"

namespace ferry::trainer {
namespace {

constexpr const char* kPending = "pending";  // in a checkpoint: the number of answers beside it

RoleFolders role_folders(const PpoConfig& config) {
  return config.use_critic() ? RoleFolders{"actor", "critic"} : RoleFolders{"actor"};
}

}  // namespace

PpoTrainer::PpoTrainer(const PpoConfig& config, models::World& world, PpoOutput output)
    : world_(world),
      origin_(open_checkpoint(config.model)),
      planned_(planned(config, *origin_, world, output.say)),
      config_(planned_.config),
      tools_(shared_tools(config.rollout.agents, world)),
      encoder_(tokenizer_folder(config.model, *origin_),
               config.data,
               tools_.schemas,
               origin_->map.config),
      stream_(
          open_training_records(config.data, config.trainer.run, prompt_parser(encoder_, config_))),
      total_steps_(
          run_length(
              config.trainer.run,
              config.checkpoint.save_freq,
              "data.train_batch_size",
              config.data.train_batch_size,
              [&] { return count_records(world, stream_, prompt_parser(encoder_, config_)); })
              .steps),
      start_(
          run_start(config.checkpoint, config.trainer.run.default_local_dir, role_folders(config))),
      workers_(world, config_, origin_, encoder_, tools_, total_steps_),
      batch_worker_(config_, encoder_, world, workers_, start_.step),
      kl_(config.algorithm.kl_ctrl),
      step_(start_.step) {
  const std::filesystem::path folder = config.trainer.run.default_local_dir;
  workers_.begin_timeline(folder / kTimelineFolder, first_logged_step(step_));
  const auto memory = workers_.expect_memory();
  if (world.rank() != 0) return;
  output.say(fmt::format("loaded     {}", config_.model.path));
  for (const auto& note : memory) output.say("memory     " + note);
  log_ = std::make_unique<PpoLog>(config_, world, origin_->map.config, step_, total_steps_,
                                  std::move(output.say));
  distckpt::write_text(folder / kPlanFile, planned_.text);
  if (!tools_.listed.empty()) write_listed_tools(tools_, folder / kSessionFolder);
  rollout_ = std::make_unique<RolloutLoop>(
      config_, encoder_, stream_, workers_, batch_worker_, *log_,
      [this](std::int64_t step) { return saves_behind(step); }, step_, total_steps_);
}

PpoTrainer::~PpoTrainer() = default;

void PpoTrainer::run() {
  if (world_.rank() != 0) return workers_.serve();
  fit();
  workers_.stop();
}

void PpoTrainer::fit() {
  resume();
  (void)workers_.message_metrics();  // of the start
  workers_.begin_step(step_ + 1);
  validate_before_train();
  while (step_ < total_steps_ && !config_.trainer.val_only) {
    train_step();
    // Saves behind its numbers: a run that dies before both are written does the step again.
    if (saves_behind(step_))
      log_->time_save([&] { save(); });
    else
      finish_save(/*wait=*/false);  // tells of a save that failed without waiting for the next
  }
  finish_save();
  log_->finish();
}

// A run that goes on in its own folder has done it when it began.
void PpoTrainer::validate_before_train() {
  const auto& run = config_.trainer.run;
  const bool is_asked = run.val_before_train && !goes_on(start_, run.default_local_dir);
  if (!config_.trainer.val_only && (!is_asked || config_.data.val_files.empty())) return;
  rollout_->wake(step_);
  const auto metrics = rollout_->validate(step_);
  log_->write(step_, metrics);
  if (!config_.trainer.val_only) return;
  for (const auto& [name, value] : metrics)
    log_->say(fmt::format("validated  step {}: {} {:.6g}", step_, name, value));
}

void PpoTrainer::train_step() {
  log_->begin_step(step_ + 1);
  auto batch = rollout_->next_batch(step_);  // responses and their rewards
  add_old_log_probs(batch);
  if (config_.use_reference_policy())
    log_->phase("ref", [&] { batch.take(workers_.compute_ref_log_prob(batch)); });
  if (config_.use_critic())
    log_->phase("values", [&] { batch.take(workers_.compute_values(batch)); });
  log_->phase("adv",
              [&] { batch.take(batch_worker_.compute_advantages(batch, kl_, log_->metrics())); });
  learn(batch);
  report(batch);
  ++step_;
  validate();
  workers_.begin_step(step_ + 1);
  report_run();
  log_->end_step(batch);
}

void PpoTrainer::add_old_log_probs(RolloutBatch& batch) {
  if (config_.algorithm.rollout_correction.bypass_mode || config_.takes_old_log_prob())
    batch.alias(&RolloutBatch::old_log_probs, &RolloutBatch::rollout_log_probs);
  else
    log_->phase("old_log_prob", [&] { batch.take(workers_.compute_log_prob(batch)); });
  log_->metrics().merge(batch_worker_.compare_log_probs(batch));
}

void PpoTrainer::learn(const RolloutBatch& batch) {
  std::string not_finite;  // a parameter without a finite gradient
  bool may_recover = false;
  const auto update = [&](const char* name, auto method) {
    UpdateOutput output;
    log_->phase(name, [&] { output = (workers_.*method)(batch); });
    log_->add_update(name, output);
    if (output.not_finite.empty()) return;
    not_finite = output.not_finite;
    may_recover = output.loss_scale != 1;
  };
  if (config_.use_critic()) update("update_critic", &PpoWorkers::update_critic);
  if (step_ + 1 >= config_.trainer.critic_warmup) update("update_actor", &PpoWorkers::update_actor);
  not_finite_.add(not_finite, may_recover);
}

void PpoTrainer::report(const RolloutBatch& batch) {
  log_->metrics().merge(batch_worker_.compute_metrics(batch));
  batch_worker_.write_rollouts(step_ + 1, batch);
}

void PpoTrainer::report_run() {
  auto& metrics = log_->metrics();
  metrics["training/malformed_rows"] = static_cast<double>(stream_.malformed().count);
  if (!config_.reward.command.empty())
    metrics["reward/num_restarts"] = static_cast<double>(workers_.num_reward_restarts());
  metrics.merge(workers_.message_metrics());
}

void PpoTrainer::validate() {
  const bool due = !config_.data.val_files.empty() && is_due(config_.trainer.run.test_freq, step_);
  // The next step would wait for these answers, too.
  if (rollout_->is_answering_ahead() && (due || saves_behind(step_)))
    log_->phase("gen", [&] { rollout_->finish_answering_ahead(); });
  if (!due) return;
  log_->phase("update_weights", [&] { rollout_->wake(step_); });
  log_->phase("testing", [&] { log_->metrics().merge(rollout_->validate(step_)); });
}

bool PpoTrainer::is_due(const Frequency& frequency, std::int64_t step) const {
  return frequency.comes_behind(step, 0) || (frequency.is_regular() && step == total_steps_);
}

bool PpoTrainer::saves_behind(std::int64_t step) const {
  return is_due(config_.checkpoint.save_freq, step);
}

void PpoTrainer::resume() {
  if (step_ == 0) return;
  workers_.begin_step(step_);
  const auto caller = workers_.load_checkpoints(step_, start_.root);
  stream_.restore(Record::parse(caller.at("data")));
  if (const auto pending = caller.find(kPending); pending != caller.end() && pending->second != "0")
    rollout_->restore_pending(start_.root.empty()
                                  ? std::filesystem::path(config_.trainer.run.default_local_dir)
                                  : start_.root,
                              step_);
  kl_.restore(std::stod(caller.at("kl_coef")));
  finish_resumed_save(start_, config_.checkpoint, config_.model,
                      config_.trainer.run.default_local_dir, role_folders(config_));
  forget_pending(
      config_.trainer.run.default_local_dir,
      saved_iterations(std::filesystem::path(config_.trainer.run.default_local_dir) / "actor"));
  log_->say(fmt::format("resumed    after step {}", step_));
}

void PpoTrainer::save() {
  finish_save();
  workers_.begin_step(step_);
  rollout_->sleep();  // the actor's weights may rest where it is awake
  const auto pending = rollout_->save_pending(step_);
  workers_.save_checkpoints(step_, {{"data", rollout_->data_state(step_).dump()},
                                    {kPending, fmt::format("{}", pending)},
                                    {"kl_coef", fmt::format("{}", kl_.value())}});
  workers_.begin_step(step_ + 1);
  if (!config_.checkpoint.async_save) published();
  log_->say(fmt::format("saved      step {} to {}", step_, config_.trainer.run.default_local_dir));
}

void PpoTrainer::finish_save(bool wait) {
  if (config_.checkpoint.async_save && workers_.finish_saves(wait)) published();
}

void PpoTrainer::published() const {
  const std::filesystem::path run = config_.trainer.run.default_local_dir;
  forget_pending(run, saved_iterations(run / "actor"));
  if (config_.checkpoint.save_hf) save_hf(run / "actor", config_.model.hf_config_path);
}

}  // namespace ferry::trainer
