// The memory that the roles of a run share on one rank: where one of them finds none, what the
// others keep there, and which settings would have it elsewhere.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "models/distributed/world.h"
#include "trainer/config/ppo_config.h"
#include "trainer/engine/megatron_engine.h"
#include "trainer/plan/model_role.h"

namespace ferry::trainer {

// A part of a step, "update_actor", and the role whose parameters and gradients it needs, if any.
struct StepPhase {
  std::string name{};
  std::optional<Role> role{};
};

class RankMemory {
 public:
  RankMemory(const RolloutConfig& rollout, models::World& world);

  // A role of this rank, which outlives this; null: another rank's.
  void add(const MegatronEngine* role);

  // Runs `body` in a phase. An OutOfMemory names the phase and says what
  // the other roles could give back.
  void run(const StepPhase& phase, const std::function<void()>& body) const;

  // Names each rank whose roles may not find the memory of their largest micro-batches, and says
  // what would fit. All ranks call it before the first step; it returns the same on all.
  std::vector<std::string> expect() const;

 private:
  std::string ways(const StepPhase& phase) const;

  const RolloutConfig& rollout_;
  models::World& world_;
  std::vector<const MegatronEngine*> roles_;
};

}  // namespace ferry::trainer
