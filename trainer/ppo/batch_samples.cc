#include "trainer/ppo/batch_samples.h"

#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "trainer/agents/session_journal.h"
#include "trainer/ppo/ppo_batch.h"

namespace ferry::trainer {
namespace {

// The runs of tokens by the model and by others, as [whether by the model, text]; nothing for a
// response of one turn, or without its mask.
nlohmann::json turns_of(const RolloutBatch& batch, std::int64_t row, const PromptEncoder& encoder) {
  auto turns = nlohmann::json::array();
  if (!batch.response_mask.defined()) return turns;
  const auto mask = batch.response_of(batch.response_mask, row).to(at::kBool).contiguous();
  if (mask.all().item<bool>()) return turns;
  const auto* const by_model = mask.const_data_ptr<bool>();
  const auto tokens = batch.response(row);
  for (std::size_t begin = 0, end = 0; begin < tokens.size(); begin = end) {
    for (end = begin; end < tokens.size() && by_model[end] == by_model[begin];) ++end;
    turns.push_back({by_model[begin], encoder.decode(tokens.subspan(begin, end - begin), true)});
  }
  return turns;
}

}  // namespace

std::vector<LoggedSample> logged_samples(const RolloutBatch& batch, const PromptEncoder& encoder) {
  const auto scores = sequence_scores(batch);
  std::vector<LoggedSample> samples;
  for (std::int64_t row = 0; row < batch.size(); ++row) {
    const auto index = static_cast<std::size_t>(row);
    LoggedSample sample{.input = encoder.decode(batch.prompt(row), true),
                        .output = encoder.decode(batch.response(row), true),
                        .gts = batch.ground_truth[index],
                        .score = scores[row].item<double>()};
    for (const auto& [name, value] : batch.reward_extra_info[index].items())
      if (name != "score") sample.extra[name] = value;
    if (auto turns = turns_of(batch, row, encoder); !turns.empty())
      sample.extra["turns"] = std::move(turns);
    if (batch.global_steps.defined()) {
      const auto* const steps =
          batch.response_of(batch.global_steps, row).const_data_ptr<std::int64_t>();
      sample.extra["global_steps"] =
          runs_of_steps(std::span(steps, static_cast<std::size_t>(batch.response_length(row))));
    }
    samples.push_back(std::move(sample));
  }
  return samples;
}

std::vector<ValidationSample> validation_samples(const RolloutBatch& batch) {
  const auto rewards = sequence_scores(batch);
  std::vector<ValidationSample> samples;
  for (std::int64_t row = 0; row < batch.size(); ++row) {
    const auto index = static_cast<std::size_t>(row);
    ValidationSample sample{.data_source = batch.data_source[index], .uid = batch.uid[index]};
    sample.values["reward"] = rewards[row].item<double>();
    for (const auto& [name, value] : batch.reward_extra_info[index].items()) {
      if (value.is_number()) sample.values[name] = value.get<double>();
      if (value.is_string()) sample.values[name] = value.get<std::string>();
    }
    samples.push_back(std::move(sample));
  }
  return samples;
}

}  // namespace ferry::trainer
