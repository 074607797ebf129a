#include "trainer/algorithms/kl_penalty.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "distckpt/base/error.h"
#include "trainer/algorithms/masked.h"

namespace ferry::trainer {
namespace {

at::Tensor estimate(const at::Tensor& logprob, const at::Tensor& ref_logprob, KlEstimator kind) {
  switch (kind) {
    case KlEstimator::kKl:
    case KlEstimator::kK1:
      return logprob - ref_logprob;
    case KlEstimator::kAbs:
      return (logprob - ref_logprob).abs();
    case KlEstimator::kMse:
    case KlEstimator::kK2:
      return 0.5 * (logprob - ref_logprob).square();
    case KlEstimator::kLowVarKl:
    case KlEstimator::kK3: {
      const auto difference = (ref_logprob - logprob).clamp(-20, 20);
      return (difference.exp() - difference - 1).clamp(-10, 10);
    }
  }
  fail(ErrorKind::kBug, "kl_penalty: no such estimator");
}

}  // namespace

at::Tensor kl_penalty(const at::Tensor& logprob, const at::Tensor& ref_logprob, KlPenalty kind) {
  auto forward = estimate(logprob, ref_logprob, kind.estimator);
  if (!kind.straight_through) return forward;
  const auto backward = estimate(logprob, ref_logprob, KlEstimator::kK2);
  return backward - backward.detach() + forward.detach();
}

KlController::KlController(const KlCtrlConfig& control)
    : control_(control), value_(control.kl_coef) {
  if (control.type == KlCtrlType::kFixed) return;
  require(control.horizon > 0, ErrorKind::kUsage, "kl_ctrl: horizon {} is not positive",
          control.horizon);
  require(control.target_kl > 0, ErrorKind::kUsage, "kl_ctrl: target_kl {} is not positive",
          control.target_kl);
}

void KlController::update(double current_kl, std::int64_t n_steps) {
  if (control_.type == KlCtrlType::kFixed) return;
  const double error = std::clamp(current_kl / control_.target_kl - 1, -0.2, 0.2);
  value_ *= 1 + error * static_cast<double>(n_steps) / control_.horizon;
}

PenalizedRewards apply_kl_penalty(const at::Tensor& token_level_scores,
                                  const at::Tensor& old_log_probs,
                                  const at::Tensor& ref_log_prob,
                                  const at::Tensor& response_mask,
                                  KlPenalty kind,
                                  KlController& controller) {
  const double beta = controller.value();
  const auto divergence = kl_penalty(old_log_probs, ref_log_prob, kind) * response_mask;
  const auto current_kl = masked_mean(divergence, response_mask, -1).mean().item<double>();
  controller.update(current_kl, token_level_scores.size(0));
  return {.token_level_rewards = token_level_scores - beta * divergence,
          .metrics = {{"actor/reward_kl_penalty", current_kl},
                      {"actor/reward_kl_penalty_coeff", beta}}};
}

}  // namespace ferry::trainer
