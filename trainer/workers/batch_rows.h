// The rows of a batch, padded to columns as verl pads them, and the sequences without padding that
// models compute with: prompts [rows, P], zeros in front; responses [rows, R], zeros behind;
// attention_mask [rows, P + R], 1 where there is a token; response_mask [rows, R], 1 where a token
// of the answer counts.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "trainer/update/answer_batches.h"
#include "trainer/update/data_proto.h"

namespace ferry::trainer {

// The tokens that each token of an answer was drawn from, as a cell of the column `sampling_mask`,
// int32 in binary: R, how many there are of each token, these.
nlohmann::json sampling_mask_cell(const std::vector<std::vector<std::int32_t>>& of_tokens);

// Of each row, with its sampling mask if the batch has the column. Throws Error(kUsage) for an
// attention_mask with a hole.
std::vector<AnsweredPrompt> answered_prompts_of(const DataProto& batch);

// The tokens of the prompt of each row, and what is left of its attention_mask.
std::vector<std::vector<std::int64_t>> prompt_tokens_of(const DataProto& batch);

// Prompts of unlike lengths as columns `prompts` and `attention_mask` [rows, P].
DataProto prompt_columns(std::span<const std::vector<std::int64_t>> prompts, std::int64_t width);

// What each answer's tokens have, [R of the row], as a column [rows, width], zeros behind.
at::Tensor response_column(const std::vector<at::Tensor>& rows, std::int64_t width);
// The same of all of its tokens: [tokens of the row, ...] as a column [rows, width, ...], each
// beginning where its prompt does in columns of prompts `prompt_width` wide, zeros outside.
at::Tensor sequence_column(const std::vector<at::Tensor>& rows,
                           const std::vector<AnsweredPrompt>& answers,
                           std::int64_t prompt_width,
                           std::int64_t width);
std::vector<at::Tensor> sequence_rows(const at::Tensor& column,
                                      const std::vector<AnsweredPrompt>& answers,
                                      std::int64_t prompt_width);
// A column's first numbers of each row, as many as the answer has tokens.
std::vector<at::Tensor> response_rows(const at::Tensor& column,
                                      const std::vector<AnsweredPrompt>& answers);

}  // namespace ferry::trainer
