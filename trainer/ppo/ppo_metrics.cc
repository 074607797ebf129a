#include "trainer/ppo/ppo_metrics.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/corrcoef.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>

#include <limits>
#include <string>
#include <vector>

#include "distckpt/base/error.h"
#include "models/spec/costs.h"
#include "trainer/metrics/performance.h"

namespace ferry::trainer {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

void add_statistics(Metrics& metrics, const std::string& name, const at::Tensor& values) {
  const bool some = values.numel() > 0;
  metrics[name + "/mean"] = some ? values.mean().item<double>() : kNaN;
  metrics[name + "/max"] = some ? values.max().item<double>() : kNaN;
  metrics[name + "/min"] = some ? values.min().item<double>() : kNaN;
}

void add_lengths(Metrics& metrics,
                 const std::string& name,
                 const at::Tensor& lengths,  // [rows], float
                 std::int64_t longest) {
  add_statistics(metrics, name, lengths);
  metrics[name + "/clip_ratio"] =
      lengths.numel() > 0 ? (lengths == longest).to(at::kFloat).mean().item<double>() : kNaN;
}

// The share of the variance of returns that values explain, over the tokens that count.
double explained_variance(const at::Tensor& returns, const at::Tensor& values) {
  if (returns.numel() == 0) return kNaN;
  return (1 - (returns - values).var() / (returns.var() + 1e-5)).item<double>();
}

at::Tensor numbers(const std::vector<std::int64_t>& values) {
  return at::tensor(values, at::kLong).to(at::kFloat);
}

}  // namespace

Metrics staleness_metrics(const RolloutBatch& batch,
                          std::int64_t step,
                          std::int64_t most,
                          bool partial) {
  const auto newest = step - batch.max_global_steps;
  const auto oldest = step - batch.min_global_steps;
  for (const auto& extreme : {newest.min(), oldest.max()}) {
    const auto updates = extreme.item<std::int64_t>();
    require(updates >= 0 && updates <= most, ErrorKind::kBug,
            "answers by weights {} updates behind step {}: at most {} are expected", updates, step,
            most);
  }
  Metrics metrics;
  const auto add = [&](const char* name, const at::Tensor& updates) {
    add_statistics(metrics, std::string("training/off_policy/") + name, updates.to(at::kFloat));
  };
  add("trajectory_staleness", newest);
  if (partial) {
    add("trajectory_staleness_worst", oldest);
    add("trajectory_spans", oldest - newest + 1);
  }
  return metrics;
}

Metrics compute_data_metrics(const RolloutBatch& batch) {
  std::vector<std::int64_t> prompts, responses;
  for (std::int64_t row = 0; row < batch.size(); ++row) {
    prompts.push_back(batch.prompt_length(row));
    responses.push_back(batch.response_length(row));
  }
  const auto response_length = numbers(responses);  // [rows]
  const auto whole = response_length != 0;
  const auto known = [](const char* name, const at::Tensor& column) {
    require(column.defined(), ErrorKind::kUsage, "metrics of a batch: {} are not known", name);
    return column;
  };
  const auto of_sequences = [&](const char* name, const at::Tensor& column) {
    return batch.padded(known(name, column)).sum(-1).masked_select(whole);
  };
  const auto of_tokens = [&](const char* name, const at::Tensor& column) {
    return known(name, column).masked_select(batch.response_mask);
  };

  Metrics metrics;
  add_statistics(metrics, "critic/score",
                 of_sequences("token_level_scores", batch.token_level_scores));
  add_statistics(metrics, "critic/rewards",
                 of_sequences("token_level_rewards", batch.token_level_rewards));
  add_statistics(metrics, "critic/advantages", of_tokens("advantages", batch.advantages));
  const auto returns = of_tokens("returns", batch.returns);
  add_statistics(metrics, "critic/returns", returns);
  if (batch.values.defined()) {
    const auto values = of_tokens("values", batch.values);
    add_statistics(metrics, "critic/values", values);
    metrics["critic/vf_explained_var"] = explained_variance(returns, values);
  }
  add_lengths(metrics, "response_length", response_length, batch.max_response_length);
  add_lengths(metrics, "response_length_non_aborted", response_length.masked_select(whole),
              batch.max_response_length);
  metrics["response/aborted_ratio"] = whole.logical_not().to(at::kFloat).mean().item<double>();
  if (!batch.agent_info.empty()) {
    std::vector<std::int64_t> turns;
    for (const auto& session : batch.agent_info) turns.push_back(session.at("num_turns"));
    add_statistics(metrics, "num_turns", numbers(turns));
  }
  add_lengths(metrics, "prompt_length", numbers(prompts), batch.max_prompt_length);
  return metrics;
}

double compute_entropy(const RolloutBatch& batch, LossAggMode mode, double loss_scale_factor) {
  return agg_loss(batch.padded(batch.entropys), batch.padded(batch.response_mask), mode,
                  {.batch_num_tokens = batch.response_mask.sum().item<std::int64_t>(),
                   .global_batch_size = batch.size(),
                   .loss_scale_factor = loss_scale_factor})
      .item<double>();
}

Metrics calculate_debug_metrics(const RolloutBatch& batch) {
  const auto probs = [&](const at::Tensor& log_probs) {  // [tokens that count]
    return log_probs.exp().masked_select(batch.response_mask);
  };
  const auto actor = probs(batch.old_log_probs);
  const auto rollout = probs(batch.rollout_log_probs);
  const bool some = actor.numel() > 0;
  const auto difference = (actor - rollout).abs();
  return {
      {"training/rollout_probs_diff_valid", some ? 1 : 0},
      {"training/rollout_probs_diff_max", some ? difference.max().item<double>() : kNaN},
      {"training/rollout_probs_diff_mean", some ? difference.mean().item<double>() : kNaN},
      {"training/rollout_probs_diff_std", some ? difference.std().item<double>() : kNaN},
      {"training/rollout_actor_probs_pearson_corr",
       some ? at::corrcoef(at::stack(std::vector{actor, rollout}))[0][1].item<double>() : kNaN}};
}

Metrics mfu_metrics(const RolloutBatch& batch,
                    const models::TransformerConfig& actor,
                    const ActorWork& work) {
  const auto flops = models::training_flops(actor, batch.lengths());
  Metrics metrics;
  const auto add = [&](const char* name, const char* part, double operations) {
    const auto found = work.seconds.find(part);
    if (found != work.seconds.end() && found->second > 0)
      metrics[name] = operations / (found->second * work.peak_flops);
  };
  add("perf/mfu/actor", "update_actor", flops * work.ppo_epochs);
  add("perf/mfu/actor_infer", "old_log_prob", flops / 3);
  return metrics;
}

TokenCounts count_tokens(const RolloutBatch& batch) {
  const auto response = batch.response_offsets.back();
  return {.prompt = batch.offsets.back() - response, .response = response};
}

}  // namespace ferry::trainer
