// The keys of the section `algorithm`.
#include <algorithm>
#include <charconv>
#include <cmath>

#include "trainer/config/config_table.h"
#include "trainer/config/ppo_config.h"

namespace ferry::trainer {
namespace {

std::optional<double> positive(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool is_number = error == std::errc() && end == text.data() + text.size();
  return is_number && value > 0 && std::isfinite(value) ? std::optional(value) : std::nullopt;
}

}  // namespace

// Numbers below 1, and from 10, need quotes: TOML reads 0.5_2 as 0.52, and 5_0.5 as 50.5.
template <>
struct ConfigType<ThresholdBounds> {
  static std::string name() {
    return "a number from 1 to below 10, or text of any positive one, \"0.5\", or of two in "
           "ascending order, \"0.5_2.0\",";
  }
  static std::optional<ThresholdBounds> read(const ConfigValue& value) {
    if (const auto number = ConfigType<double>::read(value)) {
      if (!(*number >= 1 && *number < 10)) return std::nullopt;
      return ThresholdBounds{.upper = *number};
    }
    const auto* const text = std::get_if<std::string>(&value.value);
    if (text == nullptr) return std::nullopt;
    const auto bar = text->find('_');
    const auto upper = positive(std::string_view(*text).substr(bar == text->npos ? 0 : bar + 1));
    if (!upper) return std::nullopt;
    if (bar == text->npos) return ThresholdBounds{.upper = *upper};
    const auto lower = positive(std::string_view(*text).substr(0, bar));
    if (!lower || *lower > *upper) return std::nullopt;
    return ThresholdBounds{.lower = lower, .upper = *upper};
  }
  static ConfigValue write(const ThresholdBounds& bounds) {
    const auto number = [](double value) { return to_toml({value}); };
    return {bounds.lower ? fmt::format("{}_{}", number(*bounds.lower), number(bounds.upper))
                         : number(bounds.upper)};
  }
};

std::vector<RejectionOption> RolloutCorrectionSection::rejection_options() const {
  std::vector<RejectionOption> options;
  for (const auto& option : rollout_rs)
    if (std::ranges::find(options, option) == options.end()) options.push_back(option);
  return options;
}

std::vector<RejectionRule> RolloutCorrectionSection::rejection_rules() const {
  const auto options = rejection_options();
  const auto& bounds = rollout_rs_threshold;
  std::vector<RejectionRule> rules;
  for (std::size_t i = 0; i < options.size(); ++i)
    rules.push_back({.option = options[i], .bounds = bounds.at(bounds.size() == 1 ? 0 : i)});
  return rules;
}

void list(ConfigTable& table, AlgorithmConfig& c) {
  table.section("algorithm", "The advantages");
  table.add("adv_estimator", c.adv_estimator,
            "estimator of advantages; ferry train grpo starts from grpo");
  table.add("gamma", c.gamma,
            "discount from one token to the next; for gigpo: from one turn to the next",
            from_to(0, 1));
  table.add("lam", c.lam, "for gae: lambda", from_to(0, 1));
  table.add("norm_adv_by_std_in_grpo", c.norm_adv_by_std_in_grpo,
            "for grpo, grpo_turns: divide advantages by the group's deviation; false: Dr. GRPO");
  table.add("use_kl_in_reward", c.use_kl_in_reward,
            "subtract the divergence from the reference from rewards");
  table.add("kl_penalty", c.kl_penalty, "estimator of that divergence");
  table.section("algorithm.gigpo", "For gigpo: what turns add to the advantages of answers");
  table.add("step_advantage_w", c.gigpo.step_advantage_w, "weight of the advantages of turns",
            at_least(0));
  table.add("mode", c.gigpo.mode,
            "mean_norm: less the mean of the group; mean_std_norm: divided by its deviation, too");
  auto& control = c.kl_ctrl;
  table.section("algorithm.kl_ctrl", "The coefficient of that divergence");
  table.add("type", control.type, "fixed: constant; adaptive: steered towards target_kl");
  table.add("kl_coef", control.kl_coef, "coefficient, or initial coefficient", at_least(0));
  table.add("horizon", control.horizon, "for adaptive: number of sequences over which it acts",
            above(0));
  table.add("target_kl", control.target_kl, "for adaptive: divergence that is aimed at", above(0));
  auto& correction = c.rollout_correction;
  table.section("algorithm.rollout_correction",
                "Correction of a rollout whose probabilities are not the actor's");
  table.add("rollout_is", correction.rollout_is, "importance weights of tokens or sequences");
  table.add("rollout_is_threshold", correction.rollout_is_threshold,
            "largest importance weight; or text of two bounds, \"0.5_5.0\": weight 0 outside");
  table.add("rollout_is_batch_normalize", correction.rollout_is_batch_normalize,
            "scale importance weights to a mean of 1");
  table.add_separated("rollout_rs", correction.rollout_rs,
                      "criteria of rejection; a list, or a text with commas");
  table.add_separated(
      "rollout_rs_threshold", correction.rollout_rs_threshold,
      "thresholds of rejection, \"2.0\" or \"0.5_2.0\": one for all, or one for each criterion");
  table.add("bypass_mode", correction.bypass_mode,
            "take the rollout's probabilities as old ones, without computing them again; weights "
            "and rejection compare with the current policy in every update");
  table.add(
      "loss_type", correction.loss_type,
      "for bypass_mode: the loss of policy_loss, whose ratio is the weight; or -A log p, weighed");
  auto& filter = c.filter_groups;
  table.section(
      "algorithm.filter_groups",
      "DAPO's dynamic sampling: groups whose answers all have the same reward are replaced");
  table.add("enable", filter.enable, "replace such groups");
  table.add(
      "metric", filter.metric,
      "the number that is compared: reward, seq_reward and seq_final_reward, the whole reward; "
      "score, without the penalty for length; or another number of the reward, such as acc");
  table.add("max_num_gen_batches", filter.max_num_gen_batches,
            "batches generated for a step before the run stops; 0: no limit", at_least(0));
}

}  // namespace ferry::trainer
