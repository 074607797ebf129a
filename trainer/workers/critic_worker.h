// The worker of the critic, which learns what answers will be worth (verl's CriticWorker).
#pragma once

#include <map>
#include <string>

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

  // -> values [rows, R], of each token of the answer before it was given.
  DataProto compute_values(const DataProto& batch);
  // values, returns [rows, R] -> meta_info.metrics.
  DataProto update_critic(const DataProto& batch);

 private:
  std::map<std::string, double> learn(const DataProto& batch, double grad_scale);

  PpoConfig config_;
};

}  // namespace ferry::trainer
