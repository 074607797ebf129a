// The worker of a reward model: a checkpoint with a head of one score (verl's RewardModelWorker).
#pragma once

#include "trainer/config/ppo_config.h"
#include "trainer/workers/megatron_worker.h"

namespace ferry::trainer {

class RewardModelWorker : public MegatronWorker {
 public:
  // Called by the ranks of its mesh.
  RewardModelWorker(models::World& world,
                    const PpoConfig& config,
                    std::shared_ptr<const converter::Checkpoint> origin);

  // Returns scores, at the last tokens of rows. The policy's tokens are the model's.
  RolloutBatch compute_rm_score(const RolloutBatch& batch);

 private:
  PpoConfig config_;
};

}  // namespace ferry::trainer
