// Advantages: how much better each token was than expected. Functions of the whole batch, for
// outcomes: R of a sequence is the sum of its tokens' rewards; a group is the samples of one
// prompt. Formulas, defaults and what becomes of groups of one are those of verl
// trainer/ppo/core_algos.py.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string_view>

namespace ferry::trainer {

// n, mean, std (unbiased): of the group's R; eps = 1e-6. A group of one has mean 0, std 1.
enum class AdvantageEstimator : std::uint8_t {
  // delta_t = r_t + gamma V_t+1 - V_t, A_t = delta_t + gamma lam A_t+1, whitened; returns A + V.
  // Tokens that the mask lacks are skipped (J. Schulman et al., arXiv:1506.02438).
  kGae,
  kGrpo,  // (R - mean) / (std + eps) (Z. Shao et al., arXiv:2402.03300)
  kRloo,  // n / (n - 1) (R - mean); a group of one keeps R (A. Ahmadian et al., arXiv:2402.14740)
  kReinforcePlusPlus,          // discounted rewards to go, whitened (J. Hu, arXiv:2501.03262)
  kReinforcePlusPlusBaseline,  // R - mean, whitened
  kRemax,  // rewards to go - reward of the greedy answer (Z. Li et al., arXiv:2310.10505)
  kOpo,    // R - sum of length R / sum of lengths (Y. Hao et al., arXiv:2505.23585)
  kGpg,    // sequences / sequences whose R is not 0 x (R - mean) (X. Chu et al., arXiv:2504.02546)
  // The best sample gets (R - second best R) / (std + eps), the others 0 (C. Walder and D.
  // Karkhanis,
  // arXiv:2505.15201).
  kGrpoPassk,
};

// "gae", "grpo", ...: algorithm.adv_estimator. Throws Error(kUsage).
AdvantageEstimator advantage_estimator(std::string_view name);

struct AdvantageInputs {
  at::Tensor token_level_rewards{};       // [sequences, response], fp32
  at::Tensor response_mask{};             // [sequences, response], int64 or bool
  std::span<const std::int64_t> index{};  // [sequences], the group of each: all but gae,
                                          // reinforce_plus_plus and remax
  at::Tensor values{};                    // [sequences, response]: gae
  at::Tensor reward_baselines{};          // [sequences]: remax
};

struct AdvantageOptions {
  double gamma = 1;
  double lam = 1;
  // false: without division by std, which is Dr. GRPO (Z. Liu et al., arXiv:2503.20783).
  bool norm_adv_by_std_in_grpo = true;
};

struct Advantages {
  at::Tensor advantages{};  // [sequences, response], fp32
  at::Tensor returns{};     // the same; what a critic learns
};

// No gradients. Throws Error(kUsage) for an input that is missing, and of grpo_passk for a group of
// one.
Advantages compute_advantage(AdvantageEstimator estimator,
                             const AdvantageInputs& inputs,
                             const AdvantageOptions& options = {});

}  // namespace ferry::trainer
