// The worker of the critic, which learns the worth of responses (verl's CriticWorker).
#pragma once

#include "trainer/config/ppo_config.h"
#include "trainer/workers/megatron_worker.h"

namespace ferry::trainer {

class CriticWorker : public MegatronWorker {
 public:
  // Called by the ranks of the critic's mesh. From a language model's checkpoint it begins with
  // values of zero.
  CriticWorker(models::World& world,
               const PpoConfig& config,
               std::shared_ptr<const converter::Checkpoint> origin,
               std::int64_t total_steps);

  // Returns values.
  RolloutBatch compute_values(const RolloutBatch& batch);
  // Learns from values and returns.
  UpdateOutput update_critic(const RolloutBatch& batch);

 private:
  PpoConfig config_;
};

}  // namespace ferry::trainer
