#include "trainer/algorithms/policy_loss.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "distckpt/base/error.h"
#include "trainer/algorithms/masked.h"

namespace ferry::trainer {
namespace {

// One micro-batch of one loss; a method a mode.
class PolicyLoss {
 public:
  PolicyLoss(const PolicyLossInputs& in,
             const PolicyLossConfig& config,
             const GlobalBatchInfo& info)
      : in_(in), config_(config), info_(info), difference_(in.log_prob - in.old_log_prob) {}

  LossOutput vanilla() const {
    require(config_.clip_ratio_c > 1, ErrorKind::kUsage,
            "policy_loss: clip_ratio_c {} is not above 1", config_.clip_ratio_c);
    const auto d = difference_.clamp(-20, 20), r = d.exp();
    const auto plain = -in_.advantages * r, clipped = -in_.advantages * clip(r);
    const auto upper = at::maximum(plain, clipped);
    const auto lower = -in_.advantages * config_.clip_ratio_c;
    const auto negative = in_.advantages < 0;
    return output(aggregate(at::where(negative, at::minimum(lower, upper), upper)),
                  {{"actor/pg_clipfrac", mean(clipped > plain)},
                   {"actor/ppo_kl", mean(-d)},
                   {"actor/pg_clipfrac_lower", mean((upper > lower) & negative)}});
  }

  LossOutput gspo() const {
    const auto lengths = in_.response_mask.sum(-1).clamp_min(1);
    const auto of_sequence = (difference_ * in_.response_mask).sum(-1) / lengths;
    const auto s = (in_.log_prob - in_.log_prob.detach() + of_sequence.detach().unsqueeze(-1))
                       .clamp_max(10)
                       .exp();
    const auto plain = -in_.advantages * s, clipped = -in_.advantages * clip(s);
    return output(aggregate(at::maximum(plain, clipped)),
                  {{"actor/pg_clipfrac", mean(clipped > plain)},
                   {"actor/ppo_kl", mean(-difference_)},
                   {"actor/pg_clipfrac_lower", none()}});
  }

  LossOutput cispo() const {
    const auto d = difference_.clamp(-20, 20), r = d.exp(), clipped = clip(r);
    return output(aggregate(-clipped.detach() * in_.advantages * in_.log_prob),
                  {{"actor/pg_clipfrac", mean(r != clipped)},
                   {"actor/ppo_kl", mean(-d)},
                   {"actor/pg_clipfrac_lower", none()}});
  }

  LossOutput clip_cov() const {
    const auto kept = cov_tokens().logical_not();
    const auto r = difference_.exp();
    const auto losses = at::maximum(-in_.advantages * r, -in_.advantages * clip(r)) * kept;
    return output(aggregate(losses), {{"actor/pg_clipfrac", mean(kept.logical_not())},
                                      {"actor/ppo_kl", mean(-difference_)}});
  }

  LossOutput kl_cov() const {
    const auto plain = -in_.advantages * difference_.exp();
    const auto distance = difference_.abs();
    const auto losses = at::where(cov_tokens(), plain + config_.ppo_kl_coef * distance, plain);
    return output(aggregate(losses), {{"actor/ppo_kl", mean(distance)}});
  }

  LossOutput geo_mean() const {
    const auto sign = in_.advantages.sign();
    const auto clipped = difference_.clamp(-config_.clip_ratio_low, config_.clip_ratio_high);
    const auto least = sign * at::minimum(sign * difference_, sign * clipped);
    auto losses = -of_sequence(in_.advantages) * of_sequence(least).exp();
    if (in_.rollout_is_weights.defined())
      losses = losses * of_sequence((in_.rollout_is_weights + 1e-10).log()).exp();
    require(info_.global_batch_size > 0, ErrorKind::kUsage,
            "policy_loss: geo_mean is divided by global_batch_size, which is {}",
            info_.global_batch_size);
    const auto differs = difference_ != clipped;
    return output(losses.sum() / static_cast<double>(info_.global_batch_size),
                  {{"actor/pg_clipfrac", mean(differs & (in_.advantages > 0))},
                   {"actor/ppo_kl", mean(-difference_)},
                   {"actor/pg_clipfrac_lower", mean(differs & (in_.advantages < 0))}});
  }

  LossOutput sapo() const {
    const auto d = difference_.clamp(-20, 20);
    const auto tau = at::where(in_.advantages > 0, at::full_like(in_.advantages, config_.tau_pos),
                               at::full_like(in_.advantages, config_.tau_neg));
    const auto gates = at::sigmoid(tau * (d.exp() - 1)) * (tau.reciprocal() * 4);
    return output(agg_loss(weighed(-gates * in_.advantages), in_.response_mask,
                           LossAggMode::kSeqMeanTokenMean, info_),
                  {{"actor/pg_clipfrac", none()},
                   {"actor/ppo_kl", mean(-d)},
                   {"actor/pg_clipfrac_lower", none()}});
  }

  LossOutput gpg() const { return {.loss = aggregate(-in_.log_prob * in_.advantages)}; }

 private:
  static LossOutput output(at::Tensor loss, LossMetrics metrics) {
    return {.loss = std::move(loss), .metrics = std::move(metrics)};
  }

  at::Tensor clip(const at::Tensor& ratio) const {
    return ratio.clamp(1 - config_.clip_ratio_low, 1 + config_.clip_ratio_high);
  }

  at::Tensor cov_tokens() const {
    require(in_.cov_tokens.defined(), ErrorKind::kBug, "policy_loss: cov_tokens are missing");
    return in_.cov_tokens;
  }

  at::Tensor weighed(const at::Tensor& losses) const {
    return in_.rollout_is_weights.defined() ? losses * in_.rollout_is_weights : losses;
  }

  at::Tensor aggregate(const at::Tensor& losses) const {
    return agg_loss(weighed(losses), in_.response_mask, config_.loss_agg_mode, info_);
  }

  // The mean over the tokens of each sequence: [sequences].
  at::Tensor of_sequence(const at::Tensor& values) const {
    return (values * in_.response_mask).sum(-1) / (in_.response_mask.sum(-1) + 1e-8);
  }

  // This micro-batch's share of the mean over the tokens of the mini-batch.
  at::Tensor mean(const at::Tensor& values) const {
    return agg_loss(values.detach().to(in_.advantages.scalar_type()), in_.response_mask,
                    LossAggMode::kTokenMean, info_);
  }

  at::Tensor none() const { return at::zeros({}, in_.advantages.options()); }

  const PolicyLossInputs& in_;
  const PolicyLossConfig& config_;
  const GlobalBatchInfo& info_;
  at::Tensor difference_;  // d
};

at::Tensor draw_clip_cov(const PolicyLossInputs& in,
                         const PolicyLossConfig& config,
                         std::optional<at::Generator> generator) {
  const auto mask = in.response_mask.to(at::kBool);
  const auto r = (in.log_prob - in.old_log_prob).exp();
  const auto clipped =
      -in.advantages * r.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high) >
      -in.advantages * r;
  const auto covariance = (in.advantages - masked_mean(in.advantages, in.response_mask)) *
                          (in.log_prob - masked_mean(in.log_prob, in.response_mask));
  const auto candidates = at::nonzero((covariance < config.clip_cov_ub) &
                                      (covariance > config.clip_cov_lb) & mask & ~clipped);
  const auto wanted = std::max<std::int64_t>(
      static_cast<std::int64_t>(config.clip_cov_ratio * in.response_mask.sum().item<double>()), 1);
  const auto order = at::randperm(candidates.size(0), generator, at::TensorOptions(at::kLong));
  const auto drawn = candidates.index_select(0, order.slice(0, 0, wanted).to(candidates.device()));
  return at::zeros_like(mask).index_put_({drawn.select(1, 0), drawn.select(1, 1)},
                                         at::ones({}, mask.options()));
}

at::Tensor take_kl_cov(const PolicyLossInputs& in, const PolicyLossConfig& config) {
  const auto mask = in.response_mask.to(at::kBool);
  const auto places = at::nonzero(mask.reshape(-1)).squeeze(-1);
  auto taken = at::zeros_like(mask);
  if (places.numel() == 0) return taken;
  const auto advantages = in.advantages.reshape(-1).index_select(0, places);
  const auto log_probs = in.log_prob.reshape(-1).index_select(0, places);
  const auto covariance = (advantages - advantages.mean()) * (log_probs - log_probs.mean());
  const auto wanted = std::max<std::int64_t>(
      static_cast<std::int64_t>(static_cast<double>(places.numel()) * config.kl_cov_ratio), 1);
  const auto largest = std::get<1>(covariance.topk(wanted));
  taken.reshape(-1).index_fill_(0, places.index_select(0, largest), true);
  return taken;
}

}  // namespace

LossOutput compute_policy_loss(const PolicyLossInputs& inputs,
                               const PolicyLossConfig& config,
                               const GlobalBatchInfo& info) {
  require(inputs.log_prob.sizes() == inputs.advantages.sizes() &&
              inputs.log_prob.sizes() == inputs.old_log_prob.sizes() &&
              inputs.log_prob.sizes() == inputs.response_mask.sizes(),
          ErrorKind::kUsage, "policy_loss: inputs differ in shape");
  const PolicyLoss loss(inputs, config, info);
  switch (config.loss_mode) {
    case LossMode::kVanilla:
      return loss.vanilla();
    case LossMode::kGspo:
      return loss.gspo();
    case LossMode::kCispo:
      return loss.cispo();
    case LossMode::kClipCov:
      return loss.clip_cov();
    case LossMode::kKlCov:
      return loss.kl_cov();
    case LossMode::kGeoMean:
      return loss.geo_mean();
    case LossMode::kSapo:
      return loss.sapo();
    case LossMode::kGpg:
      return loss.gpg();
  }
  fail(ErrorKind::kBug, "policy_loss: no such loss");
}

at::Tensor select_cov_tokens(const PolicyLossInputs& mini_batch,
                             const PolicyLossConfig& config,
                             std::optional<at::Generator> generator) {
  const at::NoGradGuard no_grad;
  require(needs_cov_tokens(config.loss_mode), ErrorKind::kBug,
          "policy_loss: this loss has no cov_tokens");
  return config.loss_mode == LossMode::kClipCov
             ? draw_clip_cov(mini_batch, config, std::move(generator))
             : take_kl_cov(mini_batch, config);
}

}  // namespace ferry::trainer
