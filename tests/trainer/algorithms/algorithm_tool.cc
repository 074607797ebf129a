// The peer of tests/interop/train/test_core_algos.py: reads a question in JSON from each line of
// standard input, and writes {"answer": ...} or {"error": ...} to a line of standard output.
// Tensors are nested lists; {"op": ...} names the function, "config" its options under verl's
// names.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>

#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "distckpt/base/error.h"
#include "trainer/algorithms/advantages.h"
#include "trainer/algorithms/kl_penalty.h"
#include "trainer/algorithms/masked.h"
#include "trainer/algorithms/overlong_penalty.h"
#include "trainer/algorithms/ppo_loss.h"
#include "trainer/algorithms/rollout_corr.h"
#include "trainer/config/config_table.h"

namespace ferry::trainer {
namespace {

using nlohmann::json;

// Undefined where the question has no such key.
at::Tensor tensor(const json& question, const char* name, at::ScalarType dtype = at::kFloat) {
  if (!question.contains(name)) return {};
  const auto& rows = question.at(name);
  if (rows.empty() || !rows[0].is_array())
    return at::tensor(rows.get<std::vector<double>>(), at::kDouble).to(dtype);
  std::vector<at::Tensor> stacked;
  for (const auto& row : rows)
    stacked.push_back(at::tensor(row.get<std::vector<double>>(), at::kDouble).to(dtype));
  return at::stack(stacked);
}

json to_json(const at::Tensor& value) {
  if (value.dim() == 0) return value.item<double>();
  auto rows = json::array();
  for (const auto& row : value.unbind()) rows.push_back(to_json(row));
  return rows;
}

json to_json(const LossMetrics& metrics) {
  auto result = json::object();
  for (const auto& [name, value] : metrics) result[name] = to_json(value);
  return result;
}

template <typename T>
void set(const json& config, const char* name, T& field) {
  if (config.contains(name)) field = config.at(name).get<T>();
}

at::Tensor mask(const json& q) {
  return tensor(q, "response_mask", at::kLong);
}

template <typename T>
T choice(const json& name) {
  return parse_choice<T>("choice", name.get<std::string>());
}

GlobalBatchInfo info(const json& q) {
  GlobalBatchInfo result;
  set(q, "batch_num_tokens", result.batch_num_tokens);
  set(q, "global_batch_size", result.global_batch_size);
  set(q, "loss_scale_factor", result.loss_scale_factor);
  return result;
}

json advantage(const json& q) {
  const auto index = q.value("index", std::vector<std::int64_t>());
  const auto& config = q.at("config");
  AlgorithmConfig options{.adv_estimator = choice<AdvantageEstimator>(q.at("adv_estimator"))};
  set(config, "gamma", options.gamma);
  set(config, "lam", options.lam);
  set(config, "norm_adv_by_std_in_grpo", options.norm_adv_by_std_in_grpo);
  set(config, "step_advantage_w", options.gigpo.step_advantage_w);
  if (config.contains("mode")) options.gigpo.mode = choice<GigpoMode>(config["mode"]);
  const auto result =
      compute_advantage({.token_level_rewards = tensor(q, "token_level_rewards"),
                         .response_mask = mask(q),
                         .index = index,
                         .values = tensor(q, "values"),
                         .reward_baselines = tensor(q, "reward_baselines"),
                         .prompts = q.value("prompts", std::vector<std::vector<std::int64_t>>()),
                         .responses = tensor(q, "responses", at::kLong),
                         .turn_mask = tensor(q, "turn_mask", at::kLong)},
                        options);
  return {{"advantages", to_json(result.advantages)}, {"returns", to_json(result.returns)}};
}

// Reads it as a run does.
RolloutCorrectionSection correction_config(const json& config) {
  AlgorithmConfig options;
  ConfigTable table;
  list(table, options);
  for (const char* name :
       {"rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold"}) {
    if (!config.contains(name)) continue;
    table.set({.key = fmt::format("algorithm.rollout_correction.{}", name),
               .where = "the question",
               .value = ConfigValue{config.at(name).get<std::string>()}});
  }
  auto& correction = options.rollout_correction;
  set(config, "rollout_is_batch_normalize", correction.rollout_is_batch_normalize);
  return correction;
}

ActorLossConfig actor_config(const json& config) {
  ActorLossConfig actor;
  auto& policy = actor.policy_loss;
  policy.loss_mode = choice<LossMode>(config.at("loss_mode"));
  policy.loss_agg_mode = choice<LossAggMode>(config.at("loss_agg_mode"));
  set(config, "clip_ratio_low", policy.clip_ratio_low);
  set(config, "clip_ratio_high", policy.clip_ratio_high);
  set(config, "clip_ratio_c", policy.clip_ratio_c);
  set(config, "tau_pos", policy.tau_pos);
  set(config, "tau_neg", policy.tau_neg);
  set(config, "clip_cov_ratio", policy.clip_cov_ratio);
  set(config, "clip_cov_lb", policy.clip_cov_lb);
  set(config, "clip_cov_ub", policy.clip_cov_ub);
  set(config, "kl_cov_ratio", policy.kl_cov_ratio);
  set(config, "ppo_kl_coef", policy.ppo_kl_coef);
  if (config.contains("rollout_correction")) {
    const auto& correction = config.at("rollout_correction");
    actor.rollout_correction = correction_config(correction);
    actor.rollout_correction.bypass_mode = true;
    actor.rollout_correction.loss_type = choice<BypassLoss>(correction.at("loss_type"));
  }
  set(config, "entropy_coeff", actor.entropy_coeff);
  set(config, "use_kl_loss", actor.use_kl_loss);
  set(config, "kl_loss_coef", actor.kl_loss_coef);
  if (config.contains("kl_loss_type"))
    actor.kl_loss_type = choice<KlPenalty>(config.at("kl_loss_type"));
  return actor;
}

// The gradient of each differentiable input is in it.
json answer_of(const LossOutput& output, const std::map<std::string, at::Tensor>& leaves) {
  output.loss.backward();
  json result{{"loss", to_json(output.loss.detach())}, {"metrics", to_json(output.metrics)}};
  for (const auto& [name, leaf] : leaves)
    if (leaf.defined() && leaf.grad().defined()) result["grad"][name] = to_json(leaf.grad());
  return result;
}

json actor_loss(const json& q) {
  const auto config = actor_config(q.at("config"));
  ActorLossInputs in{.policy = {.old_log_prob = tensor(q, "old_log_prob"),
                                .log_prob = tensor(q, "log_prob").requires_grad_(),
                                .advantages = tensor(q, "advantages"),
                                .response_mask = mask(q),
                                .rollout_is_weights = tensor(q, "rollout_is_weights")},
                     .entropy = tensor(q, "entropy"),
                     .ref_log_prob = tensor(q, "ref_log_prob")};
  if (in.entropy.defined()) in.entropy.requires_grad_();
  if (needs_cov_tokens(config.policy_loss.loss_mode)) {
    auto generator = at::detail::createCPUGenerator(q.at("seed").get<std::uint64_t>());
    in.policy.cov_tokens = select_cov_tokens(in.policy, config.policy_loss, generator);
  }
  return answer_of(ppo_loss(in, config, info(q)),
                   {{"log_prob", in.policy.log_prob}, {"entropy", in.entropy}});
}

json critic_loss(const json& q) {
  const auto& config = q.at("config");
  const CriticLossInputs in{.vpreds = tensor(q, "vpreds").requires_grad_(),
                            .values = tensor(q, "values"),
                            .returns = tensor(q, "returns"),
                            .response_mask = mask(q)};
  return answer_of(value_loss(in,
                              {.cliprange_value = config.at("cliprange_value"),
                               .loss_agg_mode = choice<LossAggMode>(config.at("loss_agg_mode"))},
                              info(q)),
                   {{"vpreds", in.vpreds}});
}

json kl(const json& q) {
  const auto logprob = tensor(q, "logprob").requires_grad_();
  const auto value =
      kl_penalty(logprob, tensor(q, "ref_logprob"), choice<KlPenalty>(q.at("kl_penalty")));
  value.sum().backward();
  return {{"value", to_json(value.detach())}, {"grad", to_json(logprob.grad())}};
}

json reward_kl(const json& q) {
  const auto& control = q.at("kl_ctrl");
  KlController controller({.type = choice<KlCtrlType>(control.at("type")),
                           .kl_coef = control.at("kl_coef"),
                           .horizon = control.at("horizon"),
                           .target_kl = control.at("target_kl")});
  auto steps = json::array();
  for (int step = 0; step < q.at("steps"); ++step) {
    const auto [rewards, metrics] = apply_kl_penalty(
        tensor(q, "token_level_scores"), tensor(q, "old_log_probs"), tensor(q, "ref_log_prob"),
        mask(q), choice<KlPenalty>(q.at("kl_penalty")), controller);
    steps.push_back({{"token_level_rewards", to_json(rewards)}, {"metrics", metrics}});
  }
  return {{"steps", steps}, {"value", controller.value()}};
}

json rollout_correction(const json& q) {
  const auto result = compute_rollout_correction_and_rejection_mask(
      tensor(q, "old_log_prob"), tensor(q, "rollout_log_prob"), mask(q),
      correction_config(q.at("config")));
  json answer{{"response_mask", to_json(result.response_mask)}, {"metrics", result.metrics}};
  if (result.rollout_is_weights.defined())
    answer["rollout_is_weights"] = to_json(result.rollout_is_weights);
  return answer;
}

json masked(const json& q) {
  const auto values = tensor(q, "values");
  return {{"sum", to_json(masked_sum(values, mask(q), -1))},
          {"mean", to_json(masked_mean(values, mask(q)))},
          {"var", to_json(masked_var(values, mask(q)))},
          {"whiten", to_json(masked_whiten(values, mask(q)))}};
}

json overlong(const json& q) {
  return overlong_penalty(q.at("response_length"), q.at("max_resp_len"),
                          {.len = q.at("len"), .penalty_factor = q.at("penalty_factor")});
}

json answer(const json& q) {
  const std::string op = q.at("op");
  if (op == "advantage") return advantage(q);
  if (op == "actor_loss") return actor_loss(q);
  if (op == "critic_loss") return critic_loss(q);
  if (op == "kl_penalty") return kl(q);
  if (op == "apply_kl_penalty") return reward_kl(q);
  if (op == "rollout_correction") return rollout_correction(q);
  if (op == "masked") return masked(q);
  if (op == "overlong") return overlong(q);
  fail(ErrorKind::kUsage, "algorithm_tool: no function {}", op);
}

}  // namespace
}  // namespace ferry::trainer

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    try {
      fmt::print(
          "{}\n",
          nlohmann::json{{"answer", ferry::trainer::answer(nlohmann::json::parse(line))}}.dump());
    } catch (const ferry::Error& error) {
      fmt::print("{}\n", nlohmann::json{{"error", error.what()}}.dump());
    }
    std::fflush(stdout);
  }
}
