// PPO, GRPO and their relatives (verl's ray_trainer): the loop of ferry train ppo|grpo. Rank 0 runs
// it and decides by lengths and scores; the workers of all ranks have the rows and compute them:
//
//   prompts -> n responses each, by the rollout -> rewards -> log-probabilities of the policy as it
//   was, of the reference, values -> advantages -> critic and actor learn -> the actor's weights to
//   the rollout
//
// A step is a function of the seed, its number and the weights: a run that was stopped goes on as
// if it had not been.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "converter/open/checkpoint.h"
#include "models/distributed/world.h"
#include "trainer/agents/tools.h"
#include "trainer/algorithms/kl_penalty.h"
#include "trainer/config/ppo_config.h"
#include "trainer/data/record_stream.h"
#include "trainer/dataset/prompt_examples.h"
#include "trainer/ppo/batch_worker.h"
#include "trainer/ppo/ppo_log.h"
#include "trainer/ppo/rollout_loop.h"
#include "trainer/run/planned_run.h"
#include "trainer/run/run_start.h"
#include "trainer/run/training_run.h"
#include "trainer/update/rollout_batch.h"
#include "trainer/workers/ppo_workers.h"

namespace ferry::trainer {

struct PpoOutput {
  // Takes a line for people, without its newline, on rank 0.
  std::function<void(const std::string&)> say = [](const std::string&) {};
};

class PpoTrainer {
 public:
  // Called by all ranks: loads the models, or the newest checkpoints of the run. Throws Error.
  PpoTrainer(const PpoConfig& config, models::World& world, PpoOutput output = {});
  ~PpoTrainer();

  // Called by all ranks: from where it stands to the last step. Throws Error(kCorrupt) after too
  // many steps in a row without a finite gradient.
  void run();

  std::int64_t step() const { return step_; }  // steps that are done
  std::int64_t total_steps() const { return total_steps_; }

 private:
  void fit();
  void train_step();
  void add_old_log_probs(RolloutBatch& batch);
  void learn(const RolloutBatch& batch);
  void report(const RolloutBatch& batch);
  void validate_before_train();
  void validate();
  void report_run();  // counts of the run so far

  void resume();
  void save();
  // True where `frequency` says so, and behind the last step.
  bool is_due(const Frequency& frequency, std::int64_t step) const;
  bool saves_behind(std::int64_t step) const;
  void finish_save(bool wait = true);
  void published() const;  // behind a checkpoint that is whole

  models::World& world_;
  std::shared_ptr<const converter::Checkpoint> origin_;
  Planned<PpoConfig> planned_;
  const PpoConfig& config_;  // as planned
  Tools tools_;
  PromptEncoder encoder_;
  RecordStream stream_;
  std::int64_t total_steps_;
  RunStart start_;
  PpoWorkers workers_;
  BatchWorker batch_worker_;
  KlController kl_;
  std::int64_t step_;
  NotFiniteSteps not_finite_;
  // On rank 0:
  std::unique_ptr<PpoLog> log_;
  std::unique_ptr<RolloutLoop> rollout_;
};

}  // namespace ferry::trainer
