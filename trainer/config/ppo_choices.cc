#include "trainer/config/ppo_choices.h"

namespace ferry::trainer {

std::vector<std::string> adv_estimators() {
  return {"gae",   "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline",
          "remax", "opo",  "gpg",  "grpo_passk"};
}

std::vector<std::string> loss_modes() {
  return {"vanilla", "gspo", "cispo", "clip_cov", "kl_cov", "geo_mean", "sapo", "gpg"};
}

std::vector<std::string> loss_agg_modes() {
  return {"token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean",
          "seq-mean-token-sum-norm"};
}

std::vector<std::string> kl_penalties() {
  std::vector<std::string> names;
  for (const std::string name : {"kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"}) {
    names.push_back(name);
    names.push_back(name + "+");
  }
  return names;
}

}  // namespace ferry::trainer
