#include "trainer/workers/batch_rows.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <cstddef>
#include <cstring>

#include "distckpt/base/error.h"

namespace ferry::trainer {

nlohmann::json sampling_mask_cell(const std::vector<std::vector<std::int32_t>>& of_tokens) {
  std::vector<std::int32_t> numbers{static_cast<std::int32_t>(of_tokens.size())};
  for (const auto& ids : of_tokens) numbers.push_back(static_cast<std::int32_t>(ids.size()));
  for (const auto& ids : of_tokens) numbers.insert(numbers.end(), ids.begin(), ids.end());
  const auto* const begin = reinterpret_cast<const std::uint8_t*>(numbers.data());
  return nlohmann::json::binary({begin, begin + numbers.size() * sizeof(std::int32_t)});
}

namespace {

models::SamplingMask sampling_mask_of(const nlohmann::json& cell) {
  const auto& bytes = cell.get_binary();
  std::vector<std::int32_t> numbers(bytes.size() / sizeof(std::int32_t));
  std::memcpy(numbers.data(), bytes.data(), numbers.size() * sizeof(std::int32_t));
  models::SamplingMask mask{.offsets = {0}};
  const auto rows = static_cast<std::size_t>(numbers.at(0));
  for (std::size_t i = 0; i < rows; ++i)
    mask.offsets.push_back(mask.offsets.back() + numbers.at(i + 1));
  const auto count = static_cast<std::size_t>(mask.offsets.back());
  require(numbers.size() == 1 + rows + count, ErrorKind::kCorrupt,
          "sampling_mask: {} numbers for {} of {} tokens", numbers.size(), count, rows);
  mask.token_ids = at::tensor(
      std::vector<std::int64_t>(numbers.end() - static_cast<std::ptrdiff_t>(count), numbers.end()),
      at::kLong);
  return mask;
}

}  // namespace

std::vector<AnsweredPrompt> answered_prompts_of(const DataProto& batch) {
  const auto& prompts = batch.tensor("prompts");
  const auto& responses = batch.tensor("responses");
  const auto& mask = batch.tensor("attention_mask");
  const auto width = prompts.size(1);
  std::vector<AnsweredPrompt> answers;
  for (std::int64_t row = 0; row < batch.size(); ++row) {
    const auto of_prompt = mask[row].narrow(0, 0, width).sum().item<std::int64_t>();
    const auto of_answer = mask[row].narrow(0, width, responses.size(1)).sum().item<std::int64_t>();
    const auto tokens = mask[row].narrow(0, width - of_prompt, of_prompt + of_answer);
    require(tokens.all().item<bool>(), ErrorKind::kUsage,
            "attention_mask of row {}: has a hole, or its padding is not outside", row);
    answers.push_back({.tokens = at::cat({prompts[row].narrow(0, width - of_prompt, of_prompt),
                                          responses[row].narrow(0, 0, of_answer)}),
                       .num_prompt_tokens = of_prompt});
    if (batch.non_tensor_batch().contains("sampling_mask"))
      answers.back().sampling_mask =
          sampling_mask_of(batch.column("sampling_mask")[static_cast<std::size_t>(row)]);
  }
  return answers;
}

std::vector<std::vector<std::int64_t>> prompt_tokens_of(const DataProto& batch) {
  const auto prompts = batch.tensor("prompts").contiguous();
  const auto mask = batch.tensor("attention_mask");
  const auto width = prompts.size(1);
  std::vector<std::vector<std::int64_t>> all;
  for (std::int64_t row = 0; row < batch.size(); ++row) {
    const auto tokens = mask[row].narrow(0, 0, width).sum().item<std::int64_t>();
    const auto* const end = prompts.const_data_ptr<std::int64_t>() + (row + 1) * width;
    all.emplace_back(end - tokens, end);
  }
  return all;
}

DataProto prompt_columns(std::span<const std::vector<std::int64_t>> prompts, std::int64_t width) {
  const auto rows = static_cast<std::int64_t>(prompts.size());
  auto tokens = at::zeros({rows, width}, at::kLong);
  auto mask = at::zeros({rows, width}, at::kLong);
  for (std::int64_t row = 0; row < rows; ++row) {
    const auto& prompt = prompts[static_cast<std::size_t>(row)];
    const auto size = static_cast<std::int64_t>(prompt.size());
    require(size > 0 && size <= width, ErrorKind::kBug, "a prompt of {} tokens in {}", size, width);
    tokens[row].narrow(0, width - size, size).copy_(at::tensor(prompt, at::kLong));
    mask[row].narrow(0, width - size, size).fill_(1);
  }
  return DataProto({{"prompts", tokens}, {"attention_mask", mask}});
}

at::Tensor response_column(const std::vector<at::Tensor>& rows, std::int64_t width) {
  auto column = at::zeros({static_cast<std::int64_t>(rows.size()), width}, rows.front().options());
  for (std::size_t row = 0; row < rows.size(); ++row)
    column[static_cast<std::int64_t>(row)].narrow(0, 0, rows[row].size(0)).copy_(rows[row]);
  return column;
}

std::vector<at::Tensor> response_rows(const at::Tensor& column,
                                      const std::vector<AnsweredPrompt>& answers) {
  std::vector<at::Tensor> rows;
  for (std::size_t row = 0; row < answers.size(); ++row)
    rows.push_back(
        column[static_cast<std::int64_t>(row)].narrow(0, 0, answers[row].num_response_tokens()));
  return rows;
}

at::Tensor sequence_column(const std::vector<at::Tensor>& rows,
                           const std::vector<AnsweredPrompt>& answers,
                           std::int64_t prompt_width,
                           std::int64_t width) {
  auto shape = rows.front().sizes().vec();
  shape[0] = width;
  shape.insert(shape.begin(), static_cast<std::int64_t>(rows.size()));
  auto column = at::zeros(shape, rows.front().options());
  for (std::size_t i = 0; i < rows.size(); ++i)
    column[static_cast<std::int64_t>(i)]
        .narrow(0, prompt_width - answers[i].num_prompt_tokens, rows[i].size(0))
        .copy_(rows[i]);
  return column;
}

std::vector<at::Tensor> sequence_rows(const at::Tensor& column,
                                      const std::vector<AnsweredPrompt>& answers,
                                      std::int64_t prompt_width) {
  std::vector<at::Tensor> rows;
  for (std::size_t i = 0; i < answers.size(); ++i)
    rows.push_back(column[static_cast<std::int64_t>(i)].narrow(
        0, prompt_width - answers[i].num_prompt_tokens, answers[i].tokens.size(0)));
  return rows;
}

}  // namespace ferry::trainer
