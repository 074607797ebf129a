// The names that keys of reinforcement learning choose from, as trainer/algorithms reads them.
#pragma once

#include <string>
#include <vector>

namespace ferry::trainer {

std::vector<std::string> adv_estimators();  // algorithm.adv_estimator
std::vector<std::string> loss_modes();      // actor_rollout_ref.actor.policy_loss.loss_mode
std::vector<std::string> loss_agg_modes();  // loss_agg_mode, of actor and critic
std::vector<std::string> kl_penalties();    // kl_loss_type, algorithm.kl_penalty

}  // namespace ferry::trainer
