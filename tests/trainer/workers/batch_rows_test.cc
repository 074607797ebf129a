// Rows of a batch and the sequences that they are: there and back, for any lengths.
#include "trainer/workers/batch_rows.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "tests/support/expect.h"
#include "trainer/ppo/ppo_batch.h"

namespace ferry::trainer {
namespace batch_rows_test {

constexpr std::int64_t kPrompt = 7, kResponse = 5;

using Tokens = std::vector<std::int64_t>;
using Names = std::vector<std::string>;

Tokens random_tokens(std::mt19937& random, std::size_t most) {
  Tokens tokens(std::uniform_int_distribution<std::size_t>(1, most)(random));
  for (auto& token : tokens)
    token = std::uniform_int_distribution<std::int64_t>(0, 99)(random);  // 0 is a token, too
  return tokens;
}

Tokens tokens_of(const at::Tensor& tensor) {
  const auto whole = tensor.contiguous();
  const auto* const begin = whole.const_data_ptr<std::int64_t>();
  return {begin, begin + whole.numel()};
}

TEST(BatchRows, ThereAndBackForAnyLengths) {
  std::mt19937 random(1);
  for (int round = 0; round < 50; ++round) {
    std::vector<Tokens> prompts, answers;
    const auto count = 1 + round % 6;
    std::vector<at::Tensor> columns;
    for (int row = 0; row < count; ++row) {
      prompts.push_back(random_tokens(random, kPrompt));
      answers.push_back(random_tokens(random, kResponse));
      columns.push_back(at::tensor(answers.back(), at::kLong));
    }
    const auto asked = prompt_columns(prompts, kPrompt);
    EXPECT_EQ(prompt_tokens_of(asked), prompts);
    std::vector<at::Tensor> ones;
    for (const auto& answer : columns) ones.push_back(at::ones_like(answer));
    const auto batch =
        with_answers(asked, DataProto({{"responses", response_column(columns, kResponse)},
                                       {"response_mask", response_column(ones, kResponse)}}));
    EXPECT_EQ(batch.tensor("attention_mask").sizes(),
              (std::vector<std::int64_t>{count, kPrompt + kResponse}));
    EXPECT_EQ(prompt_tokens_of(batch), prompts);
    const auto found = answered_prompts_of(batch);
    const auto rows = response_rows(batch.tensor("responses"), found);
    for (std::size_t row = 0; row < found.size(); ++row) {
      auto whole = prompts[row];
      whole.insert(whole.end(), answers[row].begin(), answers[row].end());
      EXPECT_EQ(tokens_of(found[row].tokens), whole);
      EXPECT_EQ(found[row].num_prompt_tokens, static_cast<std::int64_t>(prompts[row].size()));
      EXPECT_EQ(tokens_of(rows[row]), answers[row]);
    }
    EXPECT_TRUE(at::equal(response_column(rows, kResponse), batch.tensor("responses")));
  }
}

TEST(BatchRows, SamplingMasksTravelAsTheyAre) {
  auto batch = prompt_columns(std::vector<Tokens>{{1, 2}, {3}}, 3);
  const auto row = [](std::initializer_list<std::int64_t> values) {
    return at::tensor(Tokens(values), at::kLong);
  };
  batch = with_answers(batch,
                       DataProto({{"responses", response_column({row({5, 6}), row({7})}, 4)},
                                  {"response_mask", response_column({row({1, 1}), row({1})}, 4)}}));
  batch.set("sampling_mask", std::vector<nlohmann::json>{sampling_mask_cell({{5, 70000}, {6}}),
                                                         sampling_mask_cell({{1, 7, 9}})});
  const auto found = answered_prompts_of(DataProto::from_bytes(batch.to_bytes()));
  EXPECT_EQ(found[0].sampling_mask.offsets, (Tokens{0, 2, 3}));
  EXPECT_EQ(tokens_of(found[0].sampling_mask.token_ids), (Tokens{5, 70000, 6}));
  EXPECT_EQ(found[1].sampling_mask.offsets, (Tokens{0, 3}));
  EXPECT_EQ(tokens_of(found[1].sampling_mask.token_ids), (Tokens{1, 7, 9}));
  EXPECT_FALSE(answered_prompts_of(batch.select(Names{"prompts", "responses", "attention_mask"}))[0]
                   .sampling_mask.defined());
}

// Tokens that response_mask leaves out are still part of the sequence: the model has read them.
TEST(BatchRows, WhatDoesNotCountStaysInTheSequence) {
  auto batch = prompt_columns(std::vector<Tokens>{{1, 2}}, 3);
  batch =
      with_answers(batch, DataProto({{"responses", at::tensor({5, 6, 7}, at::kLong).unsqueeze(0)},
                                     {"response_mask", at::ones({1, 3}, at::kLong)}}));
  batch.set("response_mask", at::tensor({1, 0, 1}, at::kLong).unsqueeze(0));
  EXPECT_EQ(tokens_of(answered_prompts_of(batch).front().tokens), (Tokens{1, 2, 5, 6, 7}));
}

TEST(BatchRows, RefuseAMaskWithAHole) {
  auto batch = prompt_columns(std::vector<Tokens>{{1, 2}, {3}}, 3);
  batch.set("responses", at::zeros({2, 3}, at::kLong));
  auto mask = at::cat({batch.tensor("attention_mask"), at::ones({2, 3}, at::kLong)}, 1);
  mask[1][4] = 0;
  batch.set("attention_mask", mask);
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"row 1", "hole"},
                             [&] { (void)answered_prompts_of(batch); }));
}

TEST(BatchRows, RefuseAPromptThatHasNoPlace) {
  for (const auto& prompt : {Tokens{}, Tokens{1, 2, 3, 4}})
    EXPECT_TRUE(support::fails(ErrorKind::kBug, {"a prompt of"},
                               [&] { (void)prompt_columns(std::vector<Tokens>{prompt}, 3); }));
}

}  // namespace batch_rows_test
}  // namespace ferry::trainer
