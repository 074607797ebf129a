// The keys of the section `algorithm`, and those that estimators, losses and draws do not read.
#include <algorithm>
#include <charconv>
#include <cmath>

#include "trainer/config/config_table.h"
#include "trainer/config/ppo_config.h"
#include "trainer/config/ppo_rules.h"

namespace ferry::trainer {
namespace {

std::optional<double> positive(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool is_number = error == std::errc() && end == text.data() + text.size();
  return is_number && value > 0 && std::isfinite(value) ? std::optional(value) : std::nullopt;
}

}  // namespace

// TOML reads 0.5_2 as 0.52, and 5_0.5 as 50.5: those come here as text (config_value.h).
template <>
struct ConfigType<ThresholdBounds> {
  static std::string name() {
    return "a positive number, or text of two in ascending order, \"0.5_2.0\",";
  }
  static std::optional<ThresholdBounds> read(const ConfigValue& value) {
    if (const auto number = ConfigType<double>::read(value)) {
      if (!(*number > 0 && std::isfinite(*number))) return std::nullopt;
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

namespace {

using Estimators = std::vector<AdvantageEstimator>;
using Losses = std::vector<LossMode>;

auto estimated_by(Estimators estimators) {
  return [estimators = std::move(estimators)](const PpoConfig& c) {
    return std::ranges::find(estimators, c.algorithm.adv_estimator) != estimators.end();
  };
}

// In bypass_mode reinforce stands for all of them.
auto learned_by(Losses losses) {
  return [losses = std::move(losses)](const PpoConfig& c) {
    return c.algorithm.rollout_correction.loss_type != BypassLoss::kReinforce &&
           std::ranges::find(losses, c.actor.policy_loss.loss_mode) != losses.end();
  };
}

bool draws_when_validating(const PpoConfig& c) {
  return c.rollout.val_kwargs.temperature > 0;
}

IneffectiveKeys<PpoConfig> of_advantages() {
  using E = AdvantageEstimator;
  return {
      {{"algorithm.lam"}, estimated_by({E::kGae}), "it is of adv_estimator gae"},
      {{"algorithm.gamma"},
       estimated_by({E::kGae, E::kReinforcePlusPlus, E::kGigpo}),
       "it is of adv_estimator gae, reinforce_plus_plus, gigpo"},
      {{"algorithm.norm_adv_by_std_in_grpo"},
       estimated_by({E::kGrpo, E::kGrpoPassk, E::kGrpoTurns}),
       "it is of adv_estimator grpo, grpo_passk, grpo_turns"},
      {{"algorithm.gigpo"}, estimated_by({E::kGigpo}), "it is of adv_estimator gigpo"},
  };
}

IneffectiveKeys<PpoConfig> of_losses() {
  using L = LossMode;
  const auto loss = [](const char* name) { return kActorSection + ".policy_loss." + name; };
  const auto actor = [](const char* name) { return kActorSection + "." + name; };
  return {
      {{actor("clip_ratio"), actor("clip_ratio_low"), actor("clip_ratio_high")},
       learned_by({L::kVanilla, L::kGspo, L::kCispo, L::kClipCov, L::kGeoMean}),
       "the loss clips no ratio: policy_loss.loss_mode"},
      {{actor("clip_ratio")},
       [](const PpoConfig& c) { return !c.actor.clip_ratio_low || !c.actor.clip_ratio_high; },
       "clip_ratio_low and clip_ratio_high are set"},
      {{actor("clip_ratio_c")},
       learned_by({L::kVanilla}),
       "it is of policy_loss.loss_mode vanilla"},
      {{loss("clip_cov_ratio"), loss("clip_cov_lb"), loss("clip_cov_ub")},
       learned_by({L::kClipCov}),
       "it is of policy_loss.loss_mode clip_cov"},
      {{loss("kl_cov_ratio"), loss("ppo_kl_coef")},
       learned_by({L::kKlCov}),
       "it is of policy_loss.loss_mode kl_cov"},
      {{actor("tau_pos"), actor("tau_neg")},
       learned_by({L::kSapo}),
       "it is of policy_loss.loss_mode sapo"},
      {{actor("data_loader_seed")},
       [](const PpoConfig& c) {
         return c.actor.shuffle || (c.use_critic() && c.critic_mini_batches().shuffle) ||
                c.actor.policy_loss.loss_mode == L::kClipCov;
       },
       "nothing is drawn by it: shuffle, policy_loss.loss_mode clip_cov"},
  };
}

IneffectiveKeys<PpoConfig> of_draws() {
  const auto val = [](const char* name) { return kRolloutSection + ".val_kwargs." + name; };
  return {
      {{val("do_sample"), val("top_k"), val("top_p")},
       draws_when_validating,
       "val_kwargs.temperature is 0, which takes the likeliest token"},
      {{"data.gen_batch_size"},
       [](const PpoConfig& c) {
         return c.algorithm.filter_groups.enable || c.async_training.partial_rollout;
       },
       "it is of algorithm.filter_groups.enable and async_training.partial_rollout"},
  };
}

}  // namespace

IneffectiveKeys<PpoConfig> ineffective_in_algorithm() {
  auto all = of_advantages();
  for (auto&& some : {of_losses(), of_draws()}) all.insert(all.end(), some.begin(), some.end());
  return all;
}

}  // namespace ferry::trainer
