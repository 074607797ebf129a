// A configuration of reinforcement learning of which only what is tested is said.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "trainer/config/ppo_config.h"
#include "trainer/config/ppo_rules.h"

namespace ferry::trainer::ppo_overrides {

using Overrides = std::vector<std::string>;

inline const std::string kActor = kActorSection;
inline const std::string kRef = kRefSection;
inline const std::string kRollout = kRolloutSection;

inline PpoConfig load(Overrides more, std::string_view algorithm = "ppo") {
  const Overrides least{"actor_rollout_ref.model.path=hf", "data.train_files=train.jsonl"};
  more.insert(more.begin(), least.begin(), least.end());
  return load_ppo_config(algorithm, {}, more);
}

}  // namespace ferry::trainer::ppo_overrides
