#include "trainer/ppo/ppo_metrics.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/corrcoef.h>
#include <ATen/ops/stack.h>

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

// Of the values of each token, those of responses.
double explained_variance(const at::Tensor& returns, const at::Tensor& values) {
  if (returns.numel() == 0) return kNaN;
  return (1 - (returns - values).var() / (returns.var() + 1e-5)).item<double>();
}

struct Masks {
  at::Tensor prompt;    // [rows, P]
  at::Tensor response;  // [rows, R]
};

Masks masks_of(const DataProto& batch) {
  const auto& attention_mask = batch.tensor("attention_mask");
  const auto width = attention_mask.size(1) - batch.tensor("responses").size(1);
  return {.prompt = attention_mask.slice(1, 0, width), .response = attention_mask.slice(1, width)};
}

}  // namespace

Metrics staleness_metrics(const DataProto& batch, std::int64_t step, std::int64_t most) {
  const auto staleness = (step - batch.tensor("weights_step")).to(at::kFloat);
  Metrics metrics;
  add_statistics(metrics, "training/off_policy/trajectory_staleness", staleness);
  for (const char* extreme : {"/min", "/max"}) {
    const auto updates =
        metrics.at(std::string("training/off_policy/trajectory_staleness") + extreme);
    require(updates >= 0 && updates <= static_cast<double>(most), ErrorKind::kBug,
            "answers by weights {} updates behind step {}: at most {} are expected", updates, step,
            most);
  }
  return metrics;
}

Metrics compute_data_metrics(const DataProto& batch) {
  const auto masks = masks_of(batch);
  const auto prompt_length = masks.prompt.sum(-1).to(at::kFloat);      // [rows]
  const auto response_length = masks.response.sum(-1).to(at::kFloat);  // [rows]
  const auto response_mask = batch.tensor("response_mask").to(at::kBool);
  const auto whole = response_length != 0;
  const auto of_sequences = [&](const char* key) {
    return batch.tensor(key).sum(-1).masked_select(whole);
  };
  const auto of_tokens = [&](const char* key) {
    return batch.tensor(key).masked_select(response_mask);
  };

  Metrics metrics;
  add_statistics(metrics, "critic/score", of_sequences("token_level_scores"));
  add_statistics(metrics, "critic/rewards", of_sequences("token_level_rewards"));
  add_statistics(metrics, "critic/advantages", of_tokens("advantages"));
  const auto returns = of_tokens("returns");
  add_statistics(metrics, "critic/returns", returns);
  if (batch.batch().contains("values")) {
    const auto values = of_tokens("values");
    add_statistics(metrics, "critic/values", values);
    metrics["critic/vf_explained_var"] = explained_variance(returns, values);
  }
  const auto longest_response = masks.response.size(1);
  add_lengths(metrics, "response_length", response_length, longest_response);
  add_lengths(metrics, "response_length_non_aborted", response_length.masked_select(whole),
              longest_response);
  metrics["response/aborted_ratio"] = whole.logical_not().to(at::kFloat).mean().item<double>();
  add_lengths(metrics, "prompt_length", prompt_length, masks.prompt.size(1));
  return metrics;
}

double compute_entropy(const DataProto& batch, LossAggMode mode, double loss_scale_factor) {
  const auto mask = batch.tensor("response_mask");
  return agg_loss(batch.tensor("entropys"), mask, mode,
                  {.batch_num_tokens = mask.sum().item<std::int64_t>(),
                   .global_batch_size = batch.size(),
                   .loss_scale_factor = loss_scale_factor})
      .item<double>();
}

Metrics calculate_debug_metrics(const DataProto& batch) {
  const auto mask = batch.tensor("response_mask").to(at::kBool);
  const auto actor = batch.tensor("old_log_probs").exp().masked_select(mask);        // [tokens]
  const auto rollout = batch.tensor("rollout_log_probs").exp().masked_select(mask);  // [tokens]
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

Metrics mfu_metrics(const DataProto& batch,
                    const models::TransformerConfig& actor,
                    const ActorWork& work) {
  const auto lengths = batch.tensor("attention_mask").sum(-1).to(at::kLong).contiguous();
  const auto flops = models::training_flops(
      actor, {lengths.const_data_ptr<std::int64_t>(), static_cast<std::size_t>(lengths.numel())});
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

TokenCounts count_tokens(const DataProto& batch) {
  const auto masks = masks_of(batch);
  return {.prompt = masks.prompt.sum().item<std::int64_t>(),
          .response = masks.response.sum().item<std::int64_t>()};
}

}  // namespace ferry::trainer
