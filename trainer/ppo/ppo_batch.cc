#include "trainer/ppo/ppo_batch.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "distckpt/base/error.h"
#include "trainer/algorithms/advantages.h"
#include "trainer/algorithms/agg_loss.h"
#include "trainer/algorithms/rollout_corr.h"
#include "trainer/data/permutation.h"
#include "trainer/update/ppo_options.h"
#include "trainer/workers/batch_rows.h"

namespace ferry::trainer {

DataProto prompt_batch(std::span<const EncodedPrompt> prompts, const PromptBatchOptions& options) {
  std::vector<std::vector<std::int64_t>> tokens;
  std::map<std::string, std::vector<nlohmann::json>> columns;
  std::vector<std::int64_t> seeds;
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    const auto& example = prompts[i].example;
    for (std::int64_t sample = 0; sample < options.n; ++sample) {
      tokens.push_back(prompts[i].tokens);
      seeds.push_back(static_cast<std::int64_t>(derive(options.key, seeds.size()) >> 1));
      columns["uid"].emplace_back(options.uid_prefix + std::to_string(i));
      columns["data_source"].emplace_back(example.data_source);
      columns["ground_truth"].emplace_back(example.reward_model.ground_truth);
      columns["extra_info"].emplace_back(example.extra_info.is_null()
                                             ? nlohmann::json::object()
                                             : nlohmann::json(example.extra_info));
    }
  }
  auto batch = prompt_columns(tokens, options.width);
  batch.set("seeds", at::tensor(seeds, at::kLong));
  for (auto& [name, column] : columns) batch.set(name, std::move(column));
  return batch;
}

DataProto with_answers(const DataProto& prompts, const DataProto& answers) {
  auto batch = prompts;
  batch.set("attention_mask",
            at::cat({prompts.tensor("attention_mask"), answers.tensor("response_mask")}, 1));
  return batch.union_with(answers);
}

std::vector<std::string> with_given(std::vector<std::string> names,
                                    const DataProto& batch,
                                    std::initializer_list<const char*> more) {
  for (const char* name : more)
    if (batch.batch().contains(name) || batch.non_tensor_batch().contains(name))
      names.emplace_back(name);
  return names;
}

at::Tensor at_last_token(const at::Tensor& scores, const at::Tensor& response_mask) {
  auto column = at::zeros_like(response_mask, at::kFloat);
  column.scatter_(1, (response_mask.sum(1) - 1).unsqueeze(1), scores.to(at::kFloat).unsqueeze(1));
  return column;
}

std::vector<std::int64_t> group_index(const DataProto& batch) {
  std::map<std::string, std::int64_t> numbers;
  std::vector<std::int64_t> index;
  for (const auto& uid : batch.column("uid"))
    index.push_back(
        numbers.try_emplace(uid.get<std::string>(), static_cast<std::int64_t>(numbers.size()))
            .first->second);
  return index;
}

namespace {

// The worth of each answer by that metric.
std::vector<double> worth(const DataProto& batch, const std::string& metric) {
  std::vector<double> values;
  if (metric == "reward" || metric == "seq_reward" || metric == "seq_final_reward") {
    const auto sums = batch.tensor("token_level_scores").sum(1);
    for (std::int64_t row = 0; row < batch.size(); ++row)
      values.push_back(sums[row].item<double>());
    return values;
  }
  const auto& extras = batch.column("reward_extra_info");
  for (std::size_t row = 0; row < extras.size(); ++row) {
    const auto found = extras[row].find(metric);
    require(found != extras[row].end() && found->is_number(), ErrorKind::kUsage,
            "algorithm.filter_groups.metric: rewards of {} have no number {}",
            batch.column("data_source")[row].get<std::string>(), metric);
    values.push_back(found->get<double>());
  }
  return values;
}

}  // namespace

DataProto varied_groups(const DataProto& batch, const std::string& metric) {
  const auto index = group_index(batch);
  const auto values = worth(batch, metric);
  std::map<std::int64_t, std::pair<double, double>> extent;
  for (std::size_t row = 0; row < index.size(); ++row) {
    const auto value = values[row];
    auto& [least, most] = extent.try_emplace(index[row], value, value).first->second;
    least = std::min(least, value);
    most = std::max(most, value);
  }
  std::vector<std::int64_t> kept;
  for (std::size_t row = 0; row < index.size(); ++row) {
    const auto& [least, most] = extent.at(index[row]);
    if (least != most) kept.push_back(static_cast<std::int64_t>(row));
  }
  return batch.select_idxs(kept);
}

std::vector<std::int64_t> mini_batches_of_ranks(const DataProto& batch,
                                                std::int64_t mini_batch,
                                                std::int64_t dp,
                                                bool balanced) {
  require(batch.size() % mini_batch == 0 && mini_batch % dp == 0, ErrorKind::kUsage,
          "{} answers are no multiple of mini-batches of {} on {} data parallel ranks",
          batch.size(), mini_batch, dp);
  std::vector<std::vector<std::int64_t>> of_ranks(static_cast<std::size_t>(dp));
  for (std::int64_t begin = 0; begin < batch.size(); begin += mini_batch) {
    std::vector<std::int64_t> order(static_cast<std::size_t>(mini_batch));
    std::iota(order.begin(), order.end(), 0);
    if (balanced) order = balanced_order(batch.slice(begin, begin + mini_batch), dp);
    const auto size = static_cast<std::size_t>(mini_batch / dp);
    for (std::size_t i = 0; i < order.size(); ++i) of_ranks[i / size].push_back(begin + order[i]);
  }
  std::vector<std::int64_t> all;
  for (const auto& rows : of_ranks) all.insert(all.end(), rows.begin(), rows.end());
  return all;
}

DataProto shuffled_epochs(const DataProto& batch, int epochs, std::uint64_t key) {
  const auto rows = static_cast<std::uint64_t>(batch.size());
  std::vector<std::int64_t> order;
  for (int epoch = 0; epoch < epochs; ++epoch) {
    const Permutation permutation(rows, derive(key, static_cast<std::uint64_t>(epoch)));
    for (std::uint64_t i = 0; i < rows; ++i)
      order.push_back(static_cast<std::int64_t>(permutation(i)));
  }
  return batch.select_idxs(order);
}

namespace {

// The answers' probabilities were the rollout's: weights, or a mask without what is too far off.
void correct_rollout(DataProto& batch, const RolloutCorrectionSection& section, Metrics& metrics) {
  const auto correction = compute_rollout_correction_and_rejection_mask(
      batch.tensor("old_log_probs"), batch.tensor("rollout_log_probs"),
      batch.tensor("response_mask"), rollout_correction(section));
  for (const auto& [name, value] : correction.metrics) metrics[name] = value;
  batch.set("response_mask", correction.response_mask);
  if (correction.rollout_is_weights.defined())
    batch.set("rollout_is_weights", correction.rollout_is_weights);
}

}  // namespace

void add_advantages(DataProto& batch, const PpoConfig& config, KlController& kl, Metrics& metrics) {
  const auto& algorithm = config.algorithm;
  auto rewards = batch.tensor("token_level_scores");
  if (algorithm.use_kl_in_reward) {
    auto penalized =
        apply_kl_penalty(rewards, batch.tensor("old_log_probs"), batch.tensor("ref_log_prob"),
                         batch.tensor("response_mask"), algorithm.kl_penalty, kl);
    rewards = penalized.token_level_rewards;
    for (const auto& [name, value] : penalized.metrics) metrics[name] = value;
  }
  batch.set("token_level_rewards", rewards);
  // Bypassed, it is a part of the loss.
  if (!algorithm.rollout_correction.bypass_mode)
    correct_rollout(batch, algorithm.rollout_correction, metrics);
  const auto index = group_index(batch);
  AdvantageInputs inputs{.token_level_rewards = rewards,
                         .response_mask = batch.tensor("response_mask"),
                         .index = index};
  if (batch.batch().contains("values")) inputs.values = batch.tensor("values");
  if (batch.batch().contains("reward_baselines"))
    inputs.reward_baselines = batch.tensor("reward_baselines");
  const auto result =
      compute_advantage(algorithm.adv_estimator, inputs,
                        {.gamma = algorithm.gamma,
                         .lam = algorithm.lam,
                         .norm_adv_by_std_in_grpo = algorithm.norm_adv_by_std_in_grpo});
  batch.set("advantages", result.advantages);
  batch.set("returns", result.returns);
}

}  // namespace ferry::trainer
