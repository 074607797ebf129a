// The replicas of a copy of the rollout, for all ranks of the copy: the first has the fleet, and
// tells the others what it hands out and what came back, so that all know the same sessions. A
// replica is one process with the whole model, also where ranks share one: the first rank then has
// a whole copy of the weights for its replicas.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "models/distributed/parallel_state.h"
#include "models/distributed/world.h"
#include "models/gpt_model.h"
#include "models/reshard/resharder.h"
#include "trainer/agents/agent_runner.h"
#include "trainer/config/ppo_config.h"
#include "trainer/replicas/replica_fleet.h"
#include "trainer/replicas/rollout_engine.h"

namespace ferry::trainer {

class ReplicaGroup {
 public:
  // Called by all ranks of the world. `mesh` and `model`: of the rollout, null where this rank has
  // no part in it. All outlive this.
  ReplicaGroup(models::World& world,
               const PpoConfig& config,
               const converter::Checkpoint& origin,
               const models::ParallelState* mesh,
               models::GPTModel* model);

  // The rollout has the weights behind `step`. Called by all ranks of the world.
  void give_weights(std::int64_t step);

  // ReplicaFleet has these as well. Called by all ranks of a copy.
  SessionObserver share(std::vector<Session>& sessions,
                        const rollout::SamplingParams& params,
                        SessionObserver observer);
  void recall();

 private:
  void tell(nlohmann::json& news);

  const PpoConfig& config_;
  const models::ParallelState* mesh_;
  models::GPTModel* model_;
  // The whole model of each first rank, if ranks share one, and how it gets its weights.
  std::unique_ptr<models::ParallelState> first_ranks_;
  std::vector<std::unique_ptr<models::GPTModel>> whole_;
  std::unique_ptr<models::Resharder> gather_;
  std::unique_ptr<ReplicaFleet> fleet_;  // of first ranks
  std::vector<Session>* sessions_ = nullptr;
};

}  // namespace ferry::trainer
