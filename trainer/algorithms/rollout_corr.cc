#include "trainer/algorithms/rollout_corr.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <limits>
#include <utility>

#include "distckpt/base/error.h"
#include "trainer/algorithms/masked.h"
#include "trainer/algorithms/rollout_corr_metrics.h"

namespace ferry::trainer {
namespace {

// The bounds that a rule means: of k1 the logarithms of its weights.
ThresholdBounds bounds_of(const RejectionRule& rule) {
  const auto& [lower, upper] = rule.bounds;
  if (rule.option.k != 1) return rule.bounds;
  return {.lower = std::log(lower.value_or(1 / upper)), .upper = std::log(upper)};
}

at::Tensor estimate(const at::Tensor& d, int k) {
  return k == 1 ? -d : k == 2 ? 0.5 * d.pow(2) : d.exp() - 1.0 - d;
}

at::Tensor maximum_of(const at::Tensor& tokens, const at::Tensor& mask) {
  const double none = -std::numeric_limits<double>::infinity();
  const auto largest = tokens.masked_fill(mask.logical_not(), none).amax(-1);
  return at::where(largest == none, at::zeros_like(largest), largest);
}

RejectionStatistic statistic(const RejectionRule& rule,
                             const at::Tensor& d,
                             const at::Tensor& mask) {
  using Of = RejectionOption::Of;
  const auto bounds = bounds_of(rule);
  RejectionStatistic result{.option = name_of(rule.option),
                            .of_tokens = estimate(d, rule.option.k),
                            .upper = bounds.upper,
                            .lower = bounds.lower};
  if (rule.option.of == Of::kToken) return result;
  result.of_sequence = rule.option.of == Of::kSum    ? masked_sum(result.of_tokens, mask, -1)
                       : rule.option.of == Of::kMean ? masked_mean(result.of_tokens, mask, -1)
                                                     : maximum_of(result.of_tokens, mask);
  result.of_tokens = result.of_sequence.unsqueeze(-1).expand_as(mask);
  return result;
}

// The share of the sequences with tokens that lose one.
double rejected_sequences(const at::Tensor& kept, const at::Tensor& mask) {
  const auto lost = (kept.logical_not() & mask.to(at::kBool)).any(-1);
  const auto valid = mask.sum(-1) > 0;
  return (lost.sum().to(at::kFloat) / valid.sum()).item<double>();
}

void reject(const at::Tensor& log_ratio,
            const RolloutCorrectionSection& config,
            RolloutCorrection& result) {
  const auto mask = result.response_mask;
  const auto d = log_ratio.clamp(-20, 20);
  auto all_kept = at::ones_like(mask, at::kBool);
  const auto masked = [&](const at::Tensor& kept) {
    return masked_mean(kept.logical_not().to(at::kFloat), mask).item<double>();
  };
  for (const auto& rule : config.rejection_rules()) {
    const auto rs = statistic(rule, d, mask);
    auto kept = rs.of_tokens <= rs.upper;
    if (rs.lower) kept = kept & (rs.of_tokens >= *rs.lower);
    all_kept = all_kept & kept;
    result.metrics.merge(compute_rs_metrics(rs, mask));
    result.metrics["rollout_rs_" + rs.option + "_masked_fraction"] = masked(kept);
    result.metrics["rollout_rs_" + rs.option + "_seq_masked_fraction"] =
        rejected_sequences(kept, mask);
  }
  result.metrics["rollout_rs_masked_fraction"] = masked(all_kept);
  result.metrics["rollout_rs_seq_masked_fraction"] =
      (all_kept.logical_not() & mask.to(at::kBool)).any(-1).to(at::kFloat).mean().item<double>();
  result.response_mask = mask * all_kept;
}

// The mean of the weights, every token or every sequence counting once.
at::Tensor mean_weight(const at::Tensor& weights, const at::Tensor& mask, bool of_sequences) {
  if (!of_sequences) return masked_mean(weights, mask);
  const auto valid = (mask.sum(-1) > 0).to(weights.scalar_type());
  return (masked_mean(weights, mask, -1) * valid).sum() / valid.sum().clamp_min(1e-8);
}

void weigh(const at::Tensor& log_ratio,
           const RolloutCorrectionSection& config,
           RolloutCorrection& result) {
  const auto& mask = result.response_mask;
  const bool of_sequences = config.rollout_is == RolloutIs::kSequence;
  const auto& bounds = config.rollout_is_threshold;
  ImportanceWeights is{
      .log_ratio = of_sequences ? masked_sum(log_ratio, mask, -1).unsqueeze(-1) : log_ratio,
      .of_sequences = of_sequences,
      .upper = bounds.upper,
      .lower = bounds.lower};
  is.raw = is.log_ratio.clamp(-20, 20).exp().expand_as(log_ratio) * mask;
  is.weights = bounds.lower ? at::where((is.raw >= *bounds.lower) & (is.raw <= bounds.upper),
                                        is.raw, at::zeros_like(is.raw))
                            : is.raw.clamp_max(bounds.upper);
  result.metrics.merge(compute_is_metrics(is, mask));
  result.rollout_is_weights = is.weights;
  if (!config.rollout_is_batch_normalize) return;
  const auto mean = mean_weight(is.weights, mask, of_sequences);
  const auto factor = mean.item<double>() > 1e-8 ? mean : at::ones_like(mean);
  result.rollout_is_weights = is.weights / factor;
  result.metrics["rollout_is_batch_norm_factor"] = factor.item<double>();
}

}  // namespace

RolloutCorrection compute_rollout_correction_and_rejection_mask(
    const at::Tensor& old_log_prob,
    const at::Tensor& rollout_log_prob,
    const at::Tensor& response_mask,
    const RolloutCorrectionSection& config) {
  const at::NoGradGuard no_grad;
  require(old_log_prob.sizes() == rollout_log_prob.sizes() &&
              old_log_prob.sizes() == response_mask.sizes(),
          ErrorKind::kUsage, "rollout correction: inputs differ in shape");
  require(response_mask.any().item<bool>(), ErrorKind::kUsage,
          "rollout correction: the response mask has no token");
  const auto log_ratio = old_log_prob - rollout_log_prob;
  RolloutCorrection result{
      .response_mask = response_mask,
      .metrics = compute_offpolicy_metrics(old_log_prob, rollout_log_prob, response_mask)};
  if (config.rollout_is != RolloutIs::kNone) weigh(log_ratio, config, result);
  if (!config.rollout_rs.empty()) reject(log_ratio, config, result);
  Metrics named;
  for (const auto& [name, value] : result.metrics) named["rollout_corr/" + name] = value;
  result.metrics = std::move(named);
  return result;
}

}  // namespace ferry::trainer
