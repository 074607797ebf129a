// The settings of reinforcement learning that are one of a few, with the formula of each; names are
// verl's.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "models/reshard/delta.h"
#include "trainer/config/choice.h"

namespace ferry::trainer {

// R is the sum of the rewards of a sequence, a group the samples of one prompt; n, mean, std
// (unbiased): of the group's R; eps = 1e-6. A group of one has mean 0, std 1.
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
  // The best sample gets (R - second best R) / (std + eps), the others 0 (C. Walder and
  // D. Karkhanis, arXiv:2505.15201).
  kGrpoPassk,
  // Group-in-group (L. Feng et al., arXiv:2505.10978, equations 3 to 8): R against the group's,
  // plus step_advantage_w x a turn's discounted rewards to go against those of the group's turns
  // that have seen the same since the turn before them (their anchor). Both less the mean, and
  // divided by std + eps in mean_std_norm; a turn that is alone at its anchor has 0.
  kGigpo,
  // GRPO with rewards of turns (process supervision, Z. Shao et al., arXiv:2402.03300, 4.1.3): the
  // sum, over this turn and later ones, of (reward - mean) / (std + eps) over all turns of a group.
  kGrpoTurns,
};
template <>
inline constexpr auto kChoices<AdvantageEstimator> = std::to_array<Named<AdvantageEstimator>>(
    {{"gae", AdvantageEstimator::kGae},
     {"grpo", AdvantageEstimator::kGrpo},
     {"rloo", AdvantageEstimator::kRloo},
     {"reinforce_plus_plus", AdvantageEstimator::kReinforcePlusPlus},
     {"reinforce_plus_plus_baseline", AdvantageEstimator::kReinforcePlusPlusBaseline},
     {"remax", AdvantageEstimator::kRemax},
     {"opo", AdvantageEstimator::kOpo},
     {"gpg", AdvantageEstimator::kGpg},
     {"grpo_passk", AdvantageEstimator::kGrpoPassk},
     {"gigpo", AdvantageEstimator::kGigpo},
     {"grpo_turns", AdvantageEstimator::kGrpoTurns},
     // verl's of the same numbers, but for groups of one, which a run of rloo never has.
     {"grpo_vectorized", AdvantageEstimator::kGrpo},
     {"rloo_vectorized", AdvantageEstimator::kRloo}});

// True if the advantages of an answer's turns differ by what was said between them.
constexpr bool looks_at_turns(AdvantageEstimator estimator) {
  return estimator == AdvantageEstimator::kGigpo || estimator == AdvantageEstimator::kGrpoTurns;
}

// The norms of both advantages of gigpo (verl-agent's names).
enum class GigpoMode : std::uint8_t { kMeanNorm, kMeanStdNorm };
template <>
inline constexpr auto kChoices<GigpoMode> = std::to_array<Named<GigpoMode>>(
    {{"mean_norm", GigpoMode::kMeanNorm}, {"mean_std_norm", GigpoMode::kMeanStdNorm}});

// A is the advantage, d = log_prob - old_log_prob, r = exp(d), sg stops the gradient.
enum class LossMode : std::uint8_t {
  // max(-A r, -A clip(r, 1 - low, 1 + high)), for A < 0 at most -A clip_ratio_c; d within +-20
  // (PPO, arXiv:1707.06347; dual clip, arXiv:1912.09729; clip-higher: DAPO, arXiv:2503.14476).
  kVanilla,
  // The same, once, with s = exp(log_prob - sg(log_prob) + sg(mean of d over the sequence)) for r,
  // at most exp(10) (GSPO-token, C. Zheng et al., arXiv:2507.18071).
  kGspo,
  kCispo,  // -sg(clip(r, 1 - low, 1 + high)) A log_prob (MiniMax-M1, arXiv:2506.13585)
  // max(-A r, -A clip(r, 1 - low, 1 + high)), 0 for the cov_tokens (G. Cui et al.,
  // arXiv:2505.22617).
  kClipCov,
  kKlCov,  // -A r, + ppo_kl_coef |d| for the cov_tokens (the same paper)
  // A sequence has -mean A exp(mean of d, clipped to -low, high where A makes that less of a gain),
  // summed / global_batch_size whatever loss_agg_mode is (GMPO, Y. Zhao et al., arXiv:2507.20673).
  kGeoMean,
  // -A sigmoid(tau (r - 1)) 4 / tau, with tau_pos for A > 0, else tau_neg; always
  // seq-mean-token-mean (SAPO, C. Gao et al., arXiv:2511.20347).
  kSapo,
  kGpg,  // -A log_prob (X. Chu et al., arXiv:2504.02546)
};
template <>
inline constexpr auto kChoices<LossMode> =
    std::to_array<Named<LossMode>>({{"vanilla", LossMode::kVanilla},
                                    {"gspo", LossMode::kGspo},
                                    {"cispo", LossMode::kCispo},
                                    {"clip_cov", LossMode::kClipCov},
                                    {"kl_cov", LossMode::kKlCov},
                                    {"geo_mean", LossMode::kGeoMean},
                                    {"sapo", LossMode::kSapo},
                                    {"gpg", LossMode::kGpg}});

enum class LossAggMode : std::uint8_t {
  kTokenMean,            // sum of tokens / batch_num_tokens
  kTokenSum,             // sum of tokens
  kSeqMeanTokenSum,      // sum of tokens / global_batch_size (Dr. GRPO, arXiv:2503.20783)
  kSeqMeanTokenMean,     // sum of the means of sequences / global_batch_size (GRPO's paper)
  kSeqMeanTokenSumNorm,  // sum of tokens / global_batch_size / loss_scale_factor
};
template <>
inline constexpr auto kChoices<LossAggMode> = std::to_array<Named<LossAggMode>>(
    {{"token-mean", LossAggMode::kTokenMean},
     {"token-sum", LossAggMode::kTokenSum},
     {"seq-mean-token-sum", LossAggMode::kSeqMeanTokenSum},
     {"seq-mean-token-mean", LossAggMode::kSeqMeanTokenMean},
     {"seq-mean-token-sum-norm", LossAggMode::kSeqMeanTokenSumNorm}});

// The loss of bypass mode.
enum class BypassLoss : std::uint8_t {
  // The loss of loss_mode, whose ratio is the importance weight already: weights are metrics.
  kPpoClip,
  kReinforce,  // -w A log_prob, w the importance weights, if there are any
};
template <>
inline constexpr auto kChoices<BypassLoss> = std::to_array<Named<BypassLoss>>(
    {{"ppo_clip", BypassLoss::kPpoClip}, {"reinforce", BypassLoss::kReinforce}});

// Estimates of the divergence from the probability of the token that was drawn, d = log p -
// log p_ref (J. Schulman, "Approximating KL Divergence", 2020): verl has several names for some.
enum class KlEstimator : std::uint8_t {
  kKl,  // d
  kK1,
  kAbs,  // |d|
  kMse,  // d^2 / 2
  kK2,
  kLowVarKl,  // exp(-d) - 1 + d, -d within +-20, the result within +-10
  kK3,
};

// An estimator with `+` after its name keeps its value and takes the gradient of k2, which is the
// one whose expected gradient is that of the divergence.
struct KlPenalty {
  KlEstimator estimator = KlEstimator::kLowVarKl;
  bool straight_through = false;
  bool operator==(const KlPenalty&) const = default;
};
template <>
inline constexpr auto kChoices<KlPenalty> =
    std::to_array<Named<KlPenalty>>({{"kl", {KlEstimator::kKl, false}},
                                     {"kl+", {KlEstimator::kKl, true}},
                                     {"k1", {KlEstimator::kK1, false}},
                                     {"k1+", {KlEstimator::kK1, true}},
                                     {"abs", {KlEstimator::kAbs, false}},
                                     {"abs+", {KlEstimator::kAbs, true}},
                                     {"mse", {KlEstimator::kMse, false}},
                                     {"mse+", {KlEstimator::kMse, true}},
                                     {"k2", {KlEstimator::kK2, false}},
                                     {"k2+", {KlEstimator::kK2, true}},
                                     {"low_var_kl", {KlEstimator::kLowVarKl, false}},
                                     {"low_var_kl+", {KlEstimator::kLowVarKl, true}},
                                     {"k3", {KlEstimator::kK3, false}},
                                     {"k3+", {KlEstimator::kK3, true}}});

enum class KlCtrlType : std::uint8_t { kFixed, kAdaptive };
template <>
inline constexpr auto kChoices<KlCtrlType> = std::to_array<Named<KlCtrlType>>(
    {{"fixed", KlCtrlType::kFixed}, {"adaptive", KlCtrlType::kAdaptive}});

// Importance weights of a rollout whose probabilities are not the trainer's, w = exp(d).
enum class RolloutIs : std::uint8_t {
  kNone,
  kToken,
  kSequence,  // exp(sum of d) for each token
};
template <>
inline constexpr auto kChoices<RolloutIs> = std::to_array<Named<RolloutIs>>(
    {{"", RolloutIs::kNone}, {"token", RolloutIs::kToken}, {"sequence", RolloutIs::kSequence}});

// The number of a token, or of a sequence's tokens, that rejection compares with bounds: k1 = -d,
// k2 = d^2 / 2, k3 = exp(d) - 1 - d, d as in rollout_corr.h.
struct RejectionOption {
  enum class Of : std::uint8_t { kToken, kSum, kMean, kMax };
  Of of = Of::kToken;
  int k = 1;
  bool operator==(const RejectionOption&) const = default;
};
template <>
inline constexpr auto kChoices<RejectionOption> =
    std::to_array<Named<RejectionOption>>({{"token_k1", {RejectionOption::Of::kToken, 1}},
                                           {"token_k2", {RejectionOption::Of::kToken, 2}},
                                           {"token_k3", {RejectionOption::Of::kToken, 3}},
                                           {"seq_sum_k1", {RejectionOption::Of::kSum, 1}},
                                           {"seq_sum_k2", {RejectionOption::Of::kSum, 2}},
                                           {"seq_sum_k3", {RejectionOption::Of::kSum, 3}},
                                           {"seq_mean_k1", {RejectionOption::Of::kMean, 1}},
                                           {"seq_mean_k2", {RejectionOption::Of::kMean, 2}},
                                           {"seq_mean_k3", {RejectionOption::Of::kMean, 3}},
                                           {"seq_max_k2", {RejectionOption::Of::kMax, 2}},
                                           {"seq_max_k3", {RejectionOption::Of::kMax, 3}}});

// Metrics of filter_groups that are the whole reward; others are a number of it.
inline constexpr std::string_view kSeqFinalReward = "seq_final_reward";
inline constexpr auto kWholeRewards =
    std::to_array<std::string_view>({"reward", "seq_reward", kSeqFinalReward});

enum class RouterReplayMode : std::uint8_t {
  kDisabled,
  kR2,  // the routes of compute_log_prob
  kR3,  // the routes of the rollout
};
template <>
inline constexpr auto kChoices<RouterReplayMode> =
    std::to_array<Named<RouterReplayMode>>({{"disabled", RouterReplayMode::kDisabled},
                                            {"R2", RouterReplayMode::kR2},
                                            {"R3", RouterReplayMode::kR3}});

template <>
inline constexpr auto kChoices<models::Delta> =
    std::to_array<Named<models::Delta>>({{"off", models::Delta::kOff},
                                         {"device", models::Delta::kOnDevice},
                                         {"host", models::Delta::kOnHost}});

}  // namespace ferry::trainer
