// Functions of the columns of a whole batch: advantages, metrics of tokens, samples. One rank
// computes them, the last of the actor's, from columns that others send it, so that sums have the
// same bits on any number of ranks, and rank 0 gets numbers.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "models/distributed/world.h"
#include "trainer/algorithms/kl_penalty.h"
#include "trainer/config/ppo_config.h"
#include "trainer/dataset/prompt_examples.h"
#include "trainer/metrics/metrics.h"
#include "trainer/metrics/sample_log.h"
#include "trainer/update/rollout_batch.h"
#include "trainer/workers/ppo_workers.h"

namespace ferry::trainer {

class BatchWorker {
 public:
  // Called by all ranks: adds its methods to the workers'. All outlive this. `step`: behind which
  // the run begins; later samples are removed.
  BatchWorker(const PpoConfig& config,
              const PromptEncoder& encoder,
              const models::World& world,
              PpoWorkers& workers,
              std::int64_t step);

  // Calls, on rank 0.
  //
  // The entropy of the policy that answered, and its distance from the rollout where the actor
  // computed the old log-probabilities.
  Metrics compare_log_probs(const RolloutBatch& batch);
  // token_level_scores, token_level_rewards, advantages, returns, and what a rollout correction
  // changes, as add_advantages() does.
  RolloutBatch compute_advantages(const RolloutBatch& batch, KlController& kl, Metrics& metrics);
  // compute_data_metrics() of a batch with advantages.
  Metrics compute_metrics(const RolloutBatch& batch);
  // Writes the samples of a step, if trainer.log_samples.
  void write_rollouts(std::int64_t step, const RolloutBatch& batch);
  void write_validations(std::int64_t step, const RolloutBatch& batch);

 private:
  void add_methods();
  void add(const std::string& name, const std::string& phase, WorkerGroup::Method method);
  void write(const std::string& method, std::int64_t step, const RolloutBatch& batch);

  const PpoConfig& config_;
  const PromptEncoder& encoder_;
  PpoWorkers& workers_;
  Dispatch dispatch_;
  std::unique_ptr<SampleLog> rollouts_, validations_;  // on the rank that writes them
};

}  // namespace ferry::trainer
