#include "trainer/algorithms/rollout_corr_metrics.h"

#include <ATen/ATen.h>

#include <limits>

#include "trainer/algorithms/masked.h"

namespace ferry::trainer {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double number(const at::Tensor& scalar) {
  return scalar.item<double>();
}

double fraction(const at::Tensor& which) {
  return number(which.to(at::kFloat).mean());
}

double fraction(const at::Tensor& which, const at::Tensor& mask) {
  return number(masked_mean(which.to(at::kFloat), mask));
}

double largest(const at::Tensor& values, const at::Tensor& mask) {
  return number(values.masked_fill(mask.logical_not(), -kInfinity).max());
}

double smallest(const at::Tensor& values, const at::Tensor& mask) {
  return number(values.masked_fill(mask.logical_not(), kInfinity).min());
}

// Biased standard deviation of the values held within bounds.
double deviation(const at::Tensor& values, const at::Tensor& mask, double lower, double upper) {
  if (mask.sum().item<std::int64_t>() <= 1) return 0;
  const auto held = values.clamp(lower, upper);
  const auto variance = masked_mean(held.square(), mask) - masked_mean(held, mask).square();
  return number(variance.clamp_min(0).sqrt());
}

double unbiased_deviation(const at::Tensor& values) {
  return values.numel() > 1 ? number(values.std()) : 0;
}

}  // namespace

Metrics compute_offpolicy_metrics(const at::Tensor& old_log_prob,
                                  const at::Tensor& rollout_log_prob,
                                  const at::Tensor& response_mask) {
  const auto training = masked_mean(old_log_prob, response_mask, -1);  // [sequences]
  const auto rollout = masked_mean(rollout_log_prob, response_mask, -1);
  const auto difference = rollout - training;
  const auto log_ratio = old_log_prob - rollout_log_prob;
  const auto of_sequence = masked_sum(log_ratio, response_mask, -1).clamp(-20, 20);
  return {
      {"training_ppl", number((-training).exp().mean())},
      {"training_log_ppl", number((-training).mean())},
      {"kl", number(masked_mean(rollout_log_prob - old_log_prob, response_mask))},
      {"k3_kl", number(masked_mean(log_ratio.exp() - log_ratio - 1, response_mask))},
      {"rollout_ppl", number((-rollout).exp().mean())},
      {"rollout_log_ppl", number((-rollout).mean())},
      {"log_ppl_diff", number(difference.mean())},
      {"log_ppl_abs_diff", number(difference.abs().mean())},
      {"log_ppl_diff_max", number(difference.max())},
      {"log_ppl_diff_min", number(difference.min())},
      {"ppl_ratio", number(difference.exp().mean())},
      {"chi2_token",
       number(masked_mean(log_ratio.clamp(-20, 20).exp().square(), response_mask) - 1.0)},
      {"chi2_seq", number((2.0 * of_sequence).exp().mean() - 1.0)},
  };
}

Metrics compute_is_metrics(const ImportanceWeights& is, const at::Tensor& response_mask) {
  const double lower = is.lower.value_or(1 / is.upper);
  Metrics metrics{{"rollout_is_mean", number(masked_mean(is.weights, response_mask))}};
  if (is.of_sequences) {
    const auto bound = [&](double value) { return at::scalar_tensor(value, at::kFloat).log(); };
    metrics["rollout_is_max"] = number(is.log_ratio.max().clamp_max(20).exp());
    metrics["rollout_is_min"] = number(is.log_ratio.min().exp());
    metrics["rollout_is_ratio_fraction_high"] = fraction(is.log_ratio > bound(is.upper));
    metrics["rollout_is_ratio_fraction_low"] = fraction(is.log_ratio < bound(lower));
  } else {
    metrics["rollout_is_max"] = largest(is.weights, response_mask);
    metrics["rollout_is_min"] = smallest(is.weights, response_mask);
    metrics["rollout_is_ratio_fraction_high"] = fraction(is.raw > is.upper, response_mask);
    metrics["rollout_is_ratio_fraction_low"] = fraction(is.raw < lower, response_mask);
  }
  metrics["rollout_is_std"] = deviation(is.weights, response_mask, 0, is.upper);

  const auto held = is.weights.clamp(0, is.upper);
  const auto relative = held / (masked_mean(held, response_mask) + 1e-8);
  metrics["rollout_is_eff_sample_size"] = 1 / number(masked_mean(relative.square(), response_mask));

  const auto of_sequence = masked_mean(is.weights, response_mask, -1);
  const auto raw_of_sequence = masked_mean(is.raw, response_mask, -1);
  metrics["rollout_is_seq_mean"] = number(of_sequence.mean());
  metrics["rollout_is_seq_std"] = unbiased_deviation(of_sequence);
  metrics["rollout_is_seq_max"] = number(of_sequence.max());
  metrics["rollout_is_seq_min"] = number(of_sequence.min());
  metrics["rollout_is_seq_max_deviation"] = number((of_sequence - 1.0).abs().max());
  metrics["rollout_is_seq_fraction_high"] = fraction(raw_of_sequence > is.upper);
  metrics["rollout_is_seq_fraction_low"] = fraction(raw_of_sequence < lower);
  if (is.lower)
    metrics["rollout_is_oob_ratio"] =
        fraction((is.raw < lower) | (is.raw > is.upper), response_mask);
  return metrics;
}

Metrics compute_rs_metrics(const RejectionStatistic& rs, const at::Tensor& response_mask) {
  const auto prefix = "rollout_rs_" + rs.option + "_";
  const bool of_sequences = rs.of_sequence.defined();
  const auto per_sequence =
      of_sequences ? rs.of_sequence : masked_mean(rs.of_tokens, response_mask, -1);
  const auto valid = per_sequence.index({response_mask.sum(-1) > 0});
  const auto low = [&](const auto& measure) { return rs.lower ? measure(*rs.lower) : 0.0; };

  Metrics metrics;
  const auto put = [&](const char* name, double value) { metrics[prefix + name] = value; };
  put("mean", number(masked_mean(rs.of_tokens, response_mask)));
  put("std", deviation(rs.of_tokens, response_mask, rs.lower.value_or(0), rs.upper));
  put("max", of_sequences ? number(valid.max()) : largest(rs.of_tokens, response_mask));
  put("min", of_sequences ? number(valid.min()) : smallest(rs.of_tokens, response_mask));
  const double sequences_high = fraction(valid > rs.upper);
  const double sequences_low = low([&](double bound) { return fraction(valid < bound); });
  put("fraction_high",
      of_sequences ? sequences_high : fraction(rs.of_tokens > rs.upper, response_mask));
  put("fraction_low", of_sequences ? sequences_low : low([&](double bound) {
        return fraction(rs.of_tokens < bound, response_mask);
      }));
  put("seq_mean", number(valid.mean()));
  put("seq_std", unbiased_deviation(valid));
  put("seq_max", number(valid.max()));
  put("seq_min", number(valid.min()));
  put("seq_max_deviation", number(valid.abs().max()));
  put("seq_fraction_high", sequences_high);
  if (rs.lower) put("seq_fraction_low", sequences_low);
  return metrics;
}

}  // namespace ferry::trainer
