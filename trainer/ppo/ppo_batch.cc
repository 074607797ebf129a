#include "trainer/ppo/ppo_batch.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

#include "distckpt/base/error.h"
#include "trainer/algorithms/advantages.h"
#include "trainer/algorithms/rollout_corr.h"
#include "trainer/data/permutation.h"

namespace ferry::trainer {

RolloutBatch prompt_batch(std::span<const EncodedPrompt> prompts,
                          const PpoDataConfig& data,
                          const PromptBatchOptions& options) {
  std::vector<RolloutBatch::Tokens> tokens;
  std::vector<std::int64_t> seeds;
  RolloutBatch known;
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    const auto& [example, prompt, images] = prompts[i];
    require(!prompt.empty() && prompt.size() <= static_cast<std::size_t>(data.max_prompt_length),
            ErrorKind::kBug, "a prompt of {} tokens in {}", prompt.size(), data.max_prompt_length);
    for (std::int64_t sample = 0; sample < options.n; ++sample) {
      tokens.push_back(prompt);
      seeds.push_back(static_cast<std::int64_t>(derive(options.key, seeds.size()) >> 1));
      known.uid.push_back(options.uid_prefix + std::to_string(i));
      if (options.keeps_messages) {
        known.raw_prompt.push_back(example.prompt.dump());
        known.agent_name.push_back(example.agent_name);
      }
      if (options.keeps_images) known.images.push_back(images);
      known.data_source.push_back(example.data_source);
      known.ground_truth.emplace_back(example.reward_model.ground_truth);
      known.extra_info.emplace_back(example.extra_info.is_null()
                                        ? nlohmann::json::object()
                                        : nlohmann::json(example.extra_info));
    }
  }
  auto batch = RolloutBatch::of(tokens);
  batch.max_prompt_length = data.max_prompt_length;
  batch.max_response_length = data.max_response_length;
  batch.seeds = at::tensor(seeds, at::kLong);
  batch.uid = std::move(known.uid);
  batch.images = std::move(known.images);
  batch.raw_prompt = std::move(known.raw_prompt);
  batch.agent_name = std::move(known.agent_name);
  batch.data_source = std::move(known.data_source);
  batch.ground_truth = std::move(known.ground_truth);
  batch.extra_info = std::move(known.extra_info);
  return batch;
}

at::Tensor at_last_token(const at::Tensor& scores, const RolloutBatch& batch) {
  auto column = at::zeros({batch.response_offsets.back()}, at::kFloat);
  for (std::int64_t row = 0; row < batch.size(); ++row)
    if (batch.response_length(row) > 0) batch.response_of(column, row)[-1] = scores[row];
  return column;
}

at::Tensor token_level_scores(const RolloutBatch& batch) {
  const auto scores = at_last_token(batch.scores, batch);
  return batch.turn_scores.defined() ? scores + batch.turn_scores : scores;
}

at::Tensor sequence_scores(const RolloutBatch& batch) {
  return batch.padded(token_level_scores(batch)).sum(1);
}

void add_session_info(RolloutBatch& batch) {
  for (std::int64_t row = 0; row < batch.size(); ++row) {
    const auto index = static_cast<std::size_t>(row);
    auto& extra = batch.reward_extra_info[index];
    const auto& session = batch.agent_info[index];
    extra["score"] = extra.at("score").get<double>() +
                     batch.response_of(batch.turn_scores, row).sum().item<double>();
    extra["num_turns"] = session.at("num_turns");
    extra.update(session.at("extra_info"));
  }
}

std::vector<std::int64_t> group_index(const RolloutBatch& batch) {
  std::map<std::string, std::int64_t> numbers;
  std::vector<std::int64_t> index;
  for (const auto& uid : batch.uid)
    index.push_back(
        numbers.try_emplace(uid, static_cast<std::int64_t>(numbers.size())).first->second);
  return index;
}

namespace {

// The worth of each response by that metric.
std::vector<double> worth(const RolloutBatch& batch, const std::string& metric) {
  std::vector<double> values;
  if (std::ranges::find(kWholeRewards, metric) != kWholeRewards.end()) {
    const auto scores = sequence_scores(batch);
    for (std::int64_t row = 0; row < batch.size(); ++row)
      values.push_back(scores[row].item<double>());
    return values;
  }
  for (std::size_t row = 0; row < batch.reward_extra_info.size(); ++row) {
    const auto& extra = batch.reward_extra_info[row];
    const auto found = extra.find(metric);
    require(found != extra.end() && found->is_number(), ErrorKind::kUsage,
            "algorithm.filter_groups.metric: rewards of {} have no number {}",
            batch.data_source[row], metric);
    values.push_back(found->get<double>());
  }
  return values;
}

// Adds the inputs of estimators that look at turns.
void add_turns(AdvantageInputs& inputs, const RolloutBatch& batch, const at::Tensor& turn_mask) {
  std::vector<std::int64_t> tokens;
  for (std::int64_t row = 0; row < batch.size(); ++row) {
    const auto prompt = batch.prompt(row);
    inputs.prompts.emplace_back(prompt.begin(), prompt.end());
    std::ranges::copy(batch.response(row), std::back_inserter(tokens));
  }
  inputs.responses = batch.padded(at::tensor(tokens, at::kLong));
  inputs.turn_mask = turn_mask;
}

}  // namespace

RolloutBatch varied_groups(const RolloutBatch& batch, const std::string& metric) {
  const auto index = group_index(batch);
  const auto values = worth(batch, metric);
  std::map<std::int64_t, std::pair<double, double>> extent;
  for (std::size_t row = 0; row < index.size(); ++row) {
    const auto value = values[row];
    auto& [least, most] = extent.try_emplace(index[row], value, value).first->second;
    least = std::min(least, value);
    most = std::max(most, value);
  }
  RolloutBatch::Rows kept;
  for (std::size_t row = 0; row < index.size(); ++row) {
    const auto& [least, most] = extent.at(index[row]);
    if (least != most) kept.push_back(static_cast<std::int64_t>(row));
  }
  return batch.select(kept);
}

void add_advantages(RolloutBatch& batch,
                    const PpoConfig& config,
                    KlController& kl,
                    Metrics& metrics) {
  const auto& algorithm = config.algorithm;
  batch.token_level_scores = token_level_scores(batch);
  // The matrix of a column, if it is known.
  const auto matrix = [&](const at::Tensor& column) {
    return column.defined() ? batch.padded(column) : at::Tensor();
  };
  auto mask = matrix(batch.response_mask);
  const auto turn_mask = mask;  // whatever a correction rejects
  auto rewards = matrix(batch.token_level_scores);
  if (algorithm.use_kl_in_reward) {
    auto penalized = apply_kl_penalty(rewards, matrix(batch.old_log_probs),
                                      matrix(batch.ref_log_prob), mask, algorithm.kl_penalty, kl);
    rewards = penalized.token_level_rewards;
    for (const auto& [name, value] : penalized.metrics) metrics[name] = value;
  }
  batch.token_level_rewards = batch.ragged(rewards);
  // Bypassed, correction is a part of the loss.
  if (!algorithm.rollout_correction.bypass_mode) {
    const auto correction = compute_rollout_correction_and_rejection_mask(
        matrix(batch.old_log_probs), matrix(batch.rollout_log_probs), mask,
        algorithm.rollout_correction);
    for (const auto& [name, value] : correction.metrics) metrics[name] = value;
    mask = correction.response_mask;
    batch.response_mask = batch.ragged(mask);
    if (correction.rollout_is_weights.defined())
      batch.rollout_is_weights = batch.ragged(correction.rollout_is_weights);
  }
  const auto index = group_index(batch);
  AdvantageInputs inputs{.token_level_rewards = rewards,
                         .response_mask = mask,
                         .index = index,
                         .values = matrix(batch.values),
                         .reward_baselines = batch.reward_baselines};
  if (looks_at_turns(algorithm.adv_estimator)) add_turns(inputs, batch, turn_mask);
  const auto result = compute_advantage(inputs, algorithm);
  batch.advantages = batch.ragged(result.advantages);
  batch.returns = batch.ragged(result.returns);
}

}  // namespace ferry::trainer
