// Rows of a rollout batch out of whole sequences.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>

#include <numeric>
#include <vector>

#include "tests/support/models/trainee.h"
#include "trainer/update/rollout_batch.h"

namespace ferry::support {

// Sequences [tokens], int64, of which the first tokens are the prompts.
inline trainer::RolloutBatch rollout_rows(const std::vector<at::Tensor>& sequences,
                                          const std::vector<std::int64_t>& prompt_lengths) {
  std::vector<trainer::RolloutBatch::Tokens> prompts, responses;
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    const auto* const begin = sequences[i].const_data_ptr<std::int64_t>();
    const auto* const response = begin + prompt_lengths[i];
    prompts.emplace_back(begin, response);
    responses.emplace_back(response, begin + sequences[i].numel());
  }
  return trainer::RolloutBatch::of(prompts, responses);
}

// Every dp-th row: those of this data parallel rank.
inline trainer::RolloutBatch mine(const Trainee& trainee, const trainer::RolloutBatch& all) {
  trainer::RolloutBatch::Rows rows(static_cast<std::size_t>(all.size()));
  std::iota(rows.begin(), rows.end(), 0);
  return all.select(trainee.mine(rows));
}

// [response tokens]: of each row as many times its number.
inline at::Tensor of_rows(const trainer::RolloutBatch& batch, const std::vector<double>& numbers) {
  std::vector<float> column;
  for (std::int64_t row = 0; row < batch.size(); ++row)
    column.insert(column.end(), static_cast<std::size_t>(batch.response_length(row)),
                  static_cast<float>(numbers[static_cast<std::size_t>(row)]));
  return at::tensor(column);
}

// 1 for the tokens of the first row, -0.7 for those of the second, 1, ...
inline at::Tensor alternating_advantages(const trainer::RolloutBatch& batch) {
  std::vector<double> numbers;
  for (std::int64_t row = 0; row < batch.size(); ++row) numbers.push_back(row % 2 == 0 ? 1 : -0.7);
  return of_rows(batch, numbers);
}

}  // namespace ferry::support
