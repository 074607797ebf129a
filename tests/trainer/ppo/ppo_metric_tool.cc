// The peer of tests/interop/train/test_ppo_metrics.py: reads a question in JSON from each line of
// standard input, and writes the metrics to a line of standard output. Tensors are nested lists of
// numbers.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "trainer/metrics/performance.h"
#include "trainer/metrics/sample_log.h"
#include "trainer/metrics/val_metrics.h"
#include "trainer/ppo/ppo_metrics.h"

namespace ferry::trainer {
namespace {

using nlohmann::json;

at::Tensor matrix(const json& rows) {
  std::vector<at::Tensor> stacked;
  for (const auto& row : rows) stacked.push_back(at::tensor(row.get<std::vector<double>>()));
  return at::stack(stacked);
}

// Padded columns, as verl has them, as rows.
RolloutBatch batch_of(const json& columns) {
  const auto prompt_width = matrix(columns.at("prompts")).size(1);
  const auto attention = matrix(columns.at("attention_mask"));
  std::vector<RolloutBatch::Tokens> prompts, responses;
  for (const auto& row : attention.unbind()) {
    const auto tokens = [](const at::Tensor& mask) {
      return RolloutBatch::Tokens(static_cast<std::size_t>(mask.sum().item<std::int64_t>()), 1);
    };
    prompts.push_back(tokens(row.slice(0, 0, prompt_width)));
    responses.push_back(tokens(row.slice(0, prompt_width)));
  }
  auto batch = RolloutBatch::of(prompts, responses);
  batch.max_prompt_length = prompt_width;
  batch.max_response_length = attention.size(1) - prompt_width;
  const auto take = [&](const char* name, at::Tensor RolloutBatch::*column) {
    if (columns.contains(name))
      batch.*column = batch.ragged(matrix(columns.at(name)).to(at::kFloat));
  };
  take("token_level_scores", &RolloutBatch::token_level_scores);
  take("token_level_rewards", &RolloutBatch::token_level_rewards);
  take("advantages", &RolloutBatch::advantages);
  take("returns", &RolloutBatch::returns);
  take("values", &RolloutBatch::values);
  take("old_log_probs", &RolloutBatch::old_log_probs);
  take("rollout_log_probs", &RolloutBatch::rollout_log_probs);
  batch.response_mask = batch.ragged(matrix(columns.at("response_mask")).to(at::kBool));
  return batch;
}

Metrics cost(const json& q) {
  const auto tokens = count_tokens(batch_of(q.at("batch")));
  return performance_metrics({.seconds = q.at("timing_raw").at("step"),
                              .tokens = tokens.prompt + tokens.response,
                              .response_tokens = tokens.response,
                              .num_gpus = q.at("n_gpus"),
                              .timing = q.at("timing_raw")});
}

Metrics validation(const json& q) {
  std::vector<ValidationSample> samples;
  for (std::size_t i = 0; i < q.at("data_sources").size(); ++i) {
    ValidationSample sample{.data_source = q.at("data_sources")[i], .uid = q.at("sample_uids")[i]};
    for (const auto& [name, values] : q.at("infos_dict").items()) {
      const auto& value = values.at(i);
      if (value.is_string()) sample.values[name] = value.get<std::string>();
      if (value.is_number()) sample.values[name] = value.get<double>();
    }
    samples.push_back(std::move(sample));
  }
  return validation_metrics(samples);
}

Metrics dump_generations(const json& q) {
  std::vector<LoggedSample> samples;
  for (std::size_t i = 0; i < q.at("inputs").size(); ++i) {
    samples.push_back({.input = q.at("inputs")[i],
                       .output = q.at("outputs")[i],
                       .gts = q.at("gts")[i],
                       .score = q.at("scores")[i]});
    for (const auto& [name, values] : q.at("reward_extra_infos_dict").items())
      samples.back().extra[name] = values.at(i);
  }
  SampleLog(q.at("dump_path").get<std::string>(), 1).write(q.at("global_steps"), samples);
  return {};
}

Metrics answer(const json& q) {
  const auto& op = q.at("op").get_ref<const std::string&>();
  if (op == "dump_generations") return dump_generations(q);
  if (op == "validation") return validation(q);
  if (op == "cost") return cost(q);
  const auto batch = batch_of(q.at("batch"));
  return op == "data" ? compute_data_metrics(batch) : calculate_debug_metrics(batch);
}

}  // namespace
}  // namespace ferry::trainer

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    const nlohmann::json metrics = ferry::trainer::answer(nlohmann::json::parse(line));
    fmt::print("{}\n", metrics.dump());
    std::fflush(stdout);
  }
}
