#include "trainer/algorithms/rollout_corr.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <charconv>
#include <cmath>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "distckpt/base/error.h"
#include "trainer/algorithms/masked.h"
#include "trainer/algorithms/rollout_corr_metrics.h"

namespace ferry::trainer {
namespace {

struct Bounds {
  std::optional<double> lower{};
  double upper = 0;
};

std::string_view trimmed(std::string_view text) {
  const auto begin = text.find_first_not_of(" \t");
  return begin == text.npos ? "" : text.substr(begin, text.find_last_not_of(" \t") - begin + 1);
}

std::vector<std::string_view> split(std::string_view text) {
  std::vector<std::string_view> parts;
  while (!text.empty()) {
    const auto comma = std::min(text.find(','), text.size());
    if (const auto part = trimmed(text.substr(0, comma)); !part.empty()) parts.push_back(part);
    text.remove_prefix(std::min(comma + 1, text.size()));
  }
  return parts;
}

double positive(std::string_view text, std::string_view subject) {
  double value = 0;
  text = trimmed(text);
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  require(
      error == std::errc() && end == text.data() + text.size() && value > 0 && std::isfinite(value),
      ErrorKind::kUsage, "{}: \"{}\" is no positive number", subject, text);
  return value;
}

// "2.0" or "0.5_2.0".
Bounds bounds_of(std::string_view text, std::string_view subject) {
  const auto bar = text.find('_');
  if (bar == text.npos) return {.upper = positive(text, subject)};
  const Bounds bounds{.lower = positive(text.substr(0, bar), subject),
                      .upper = positive(text.substr(bar + 1), subject)};
  require(*bounds.lower <= bounds.upper, ErrorKind::kUsage, "{}: {} is above {}", subject,
          *bounds.lower, bounds.upper);
  return bounds;
}

enum class Of : std::uint8_t { kToken, kSum, kMean, kMax };

struct RejectionOption {
  Of of = Of::kToken;
  int k = 1;
};

constexpr std::array<Named<RejectionOption>, 11> kOptions{{
    {"token_k1", {Of::kToken, 1}},
    {"token_k2", {Of::kToken, 2}},
    {"token_k3", {Of::kToken, 3}},
    {"seq_sum_k1", {Of::kSum, 1}},
    {"seq_sum_k2", {Of::kSum, 2}},
    {"seq_sum_k3", {Of::kSum, 3}},
    {"seq_mean_k1", {Of::kMean, 1}},
    {"seq_mean_k2", {Of::kMean, 2}},
    {"seq_mean_k3", {Of::kMean, 3}},
    {"seq_max_k2", {Of::kMax, 2}},
    {"seq_max_k3", {Of::kMax, 3}},
}};

struct Rule {
  std::string_view name{};
  RejectionOption option{};
  Bounds bounds{};  // of k1: logarithms
};

std::vector<Rule> rules_of(const RolloutCorrectionSection& config) {
  std::vector<Rule> rules;
  for (const auto name : split(config.rollout_rs)) {
    if (std::ranges::find(rules, name, &Rule::name) != rules.end()) continue;
    rules.push_back({.name = name, .option = find_named("rollout_rs", name, kOptions)});
  }
  const auto thresholds = split(config.rollout_rs_threshold);
  require(thresholds.size() == 1 || thresholds.size() == rules.size(), ErrorKind::kUsage,
          "rollout_rs_threshold: {} thresholds for {} options of rollout_rs, expected 1 or as many",
          thresholds.size(), rules.size());
  for (std::size_t i = 0; i < rules.size(); ++i) {
    auto& [name, option, bounds] = rules[i];
    bounds = bounds_of(thresholds[thresholds.size() == 1 ? 0 : i], "rollout_rs_threshold");
    require(option.k == 1 || !bounds.lower, ErrorKind::kUsage,
            "rollout_rs_threshold: {} has no lower bound", name);
    if (option.k == 1)
      bounds = {.lower = std::log(bounds.lower.value_or(1 / bounds.upper)),
                .upper = std::log(bounds.upper)};
  }
  return rules;
}

at::Tensor estimate(const at::Tensor& d, int k) {
  return k == 1 ? -d : k == 2 ? 0.5 * d.pow(2) : d.exp() - 1.0 - d;
}

at::Tensor maximum_of(const at::Tensor& tokens, const at::Tensor& mask) {
  const double none = -std::numeric_limits<double>::infinity();
  const auto largest = tokens.masked_fill(mask.logical_not(), none).amax(-1);
  return at::where(largest == none, at::zeros_like(largest), largest);
}

RejectionStatistic statistic(const Rule& rule, const at::Tensor& d, const at::Tensor& mask) {
  RejectionStatistic result{.option = std::string(rule.name),
                            .of_tokens = estimate(d, rule.option.k),
                            .upper = rule.bounds.upper,
                            .lower = rule.bounds.lower};
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
  for (const auto& rule : rules_of(config)) {
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
  const auto bounds = bounds_of(config.rollout_is_threshold, "rollout_is_threshold");
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
