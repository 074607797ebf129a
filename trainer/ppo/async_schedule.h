// The batches that the rollout answers while a step learns: a function of the settings and of the
// steps behind which a checkpoint is written, so that a run's answers have the same weights each
// time, and one that goes on from a checkpoint those of the run that wrote it. The rollout gets the
// weights of a checkpoint, which are the only ones that a run which goes on has.
//
//   trigger_parameter_sync_step 1, staleness_threshold 2, from step 1 on:
//
//     step that learns           1      2   3   4
//     batches that are answered  2, 3   4   5   6    beside it, by the weights behind step - 1
//     updates they are old       1, 2   2   2   2    when they are learned from
#pragma once

#include <cstdint>
#include <functional>

#include "trainer/config/ppo_config.h"

namespace ferry::trainer {

class AsyncSchedule {
 public:
  // `is_saved(step)`: whether a checkpoint is written behind that step. `step`: those that are
  // done. `total_steps`: of the run; no batch is answered for a later one.
  AsyncSchedule(const PpoConfig& config,
                std::function<bool(std::int64_t)> is_saved,
                std::int64_t step,
                std::int64_t total_steps);

  // The next step. Steps come one behind another; the first again changes nothing.
  void begin_step(std::int64_t step);

  // True if the rollout gets new weights before anything is answered for this step: in the first
  // one, and in that behind a checkpoint.
  bool begins_anew() const { return step_ - 1 == begin_; }
  // True if the rollout gets new weights for what it answers while the step learns.
  bool syncs_weights() const;
  // The last batch, by the step that learns from it, that may be asked for meanwhile.
  std::int64_t last_batch() const;
  // The prompts of the run that are under way or answered once that batch of partial rollouts has
  // been asked for.
  std::int64_t prompts_until(std::int64_t batch) const;

 private:
  std::int64_t sync_step_ = 1;
  std::int64_t ahead_ = 0;
  std::int64_t train_batch_size_ = 0;
  std::int64_t gen_batch_size_ = 0;  // 0: no partial rollouts
  std::function<bool(std::int64_t)> is_saved_;
  std::int64_t total_steps_ = 0;
  std::int64_t begin_ = 0;  // behind which the transfers of weights began to be counted
  std::int64_t step_ = 0;
};

}  // namespace ferry::trainer
