#include "trainer/workers/batch_samples.h"

#include <string>
#include <utility>

#include "trainer/workers/batch_rows.h"

namespace ferry::trainer {

std::vector<LoggedSample> logged_samples(const DataProto& batch, const PromptEncoder& encoder) {
  const auto prompts = prompt_tokens_of(batch);
  const auto answers = answered_prompts_of(batch);
  const auto scores = batch.tensor("token_level_scores").sum(1);
  std::vector<LoggedSample> samples;
  for (std::int64_t row = 0; row < batch.size(); ++row) {
    const auto index = static_cast<std::size_t>(row);
    const auto& answer = answers[index];
    const auto* const tokens = answer.tokens.const_data_ptr<std::int64_t>();
    LoggedSample sample{
        .input = encoder.decode(prompts[index], true),
        .output = encoder.decode({tokens + answer.num_prompt_tokens,
                                  static_cast<std::size_t>(answer.num_response_tokens())},
                                 true),
        .gts = batch.column("ground_truth")[index],
        .score = scores[row].item<double>()};
    for (const auto& [name, value] : batch.column("reward_extra_info")[index].items())
      if (name != "score") sample.extra[name] = value;
    samples.push_back(std::move(sample));
  }
  return samples;
}

std::vector<ValidationSample> validation_samples(const DataProto& batch) {
  const auto rewards = batch.tensor("token_level_scores").sum(1);
  std::vector<ValidationSample> samples;
  for (std::int64_t row = 0; row < batch.size(); ++row) {
    const auto index = static_cast<std::size_t>(row);
    ValidationSample sample{.data_source = batch.column("data_source")[index].get<std::string>(),
                            .uid = batch.column("uid")[index].get<std::string>()};
    sample.values["reward"] = rewards[row].item<double>();
    for (const auto& [name, value] : batch.column("reward_extra_info")[index].items()) {
      if (value.is_number()) sample.values[name] = value.get<double>();
      if (value.is_string()) sample.values[name] = value.get<std::string>();
    }
    samples.push_back(std::move(sample));
  }
  return samples;
}

}  // namespace ferry::trainer
