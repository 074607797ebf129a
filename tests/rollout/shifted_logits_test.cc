// Draws by logits that a request shifts, beside those by logits that are so themselves.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <iterator>
#include <limits>
#include <vector>

#include "rollout/sampler.h"

namespace ferry::rollout {
namespace shifted_logits_test {

SamplingRow row_at(std::int64_t position, const SamplingParams& params) {
  return {.params = &params, .seed = 7, .request = 11, .position = position};
}

SampledTokens draws(const at::Tensor& row, const SamplingParams& params) {
  constexpr std::int64_t kDraws = 200;
  std::vector<SamplingRow> rows;
  while (std::ssize(rows) < kDraws) rows.push_back(row_at(std::ssize(rows), params));
  return sample(row.expand({kDraws, row.size(0)}).contiguous(), row.size(0), rows);
}

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() &&
         at::equal(a.flatten().view(at::kByte), b.flatten().view(at::kByte));
}

TEST(ShiftedLogits, LogitBiasIsAdded) {
  at::manual_seed(3);
  const auto row = at::randn({10});
  auto biased = row.clone();
  biased[2] += 1.5;
  biased[7] -= 100;
  EXPECT_TRUE(same_bytes(draws(row, {.logit_bias = {{2, 1.5F}, {7, -100.0F}}}).tokens,
                         draws(biased, {}).tokens));
  EXPECT_FALSE(same_bytes(draws(row, {}).tokens, draws(biased, {}).tokens));
  const auto greedy = draws(row, {.temperature = 0, .logit_bias = {{5, 50.0F}}}).tokens;
  EXPECT_TRUE(at::all(greedy == 5).item<bool>());
}

TEST(ShiftedLogits, OtherTokensAreNotAllowed) {
  at::manual_seed(4);
  const auto row = at::randn({10});
  auto allowed = at::full_like(row, -std::numeric_limits<float>::infinity());
  for (const std::int64_t token : {1, 4, 9}) allowed[token] = row[token];
  const SamplingParams params{.top_p = 0.9, .allowed_token_ids = {1, 4, 9}};
  EXPECT_TRUE(same_bytes(draws(row, params).tokens, draws(allowed, {.top_p = 0.9}).tokens));
}

// The model's log-probabilities stay what they are, and so do other rows of the step.
TEST(ShiftedLogits, AreThoseOfTheirRowAlone) {
  at::manual_seed(5);
  const auto logits = at::randn({2, 10}).to(at::kBFloat16);
  const SamplingParams plain, only{.allowed_token_ids = {3}};
  std::vector<SamplingRow> rows{row_at(0, plain), row_at(1, plain)};
  const auto before = sample(logits, 10, rows);
  rows[0].params = &only;
  const auto after = sample(logits, 10, rows);
  EXPECT_EQ(after.tokens[0].item<std::int64_t>(), 3);
  EXPECT_TRUE(same_bytes(before.tokens[1], after.tokens[1]));
  EXPECT_TRUE(same_bytes(before.logprobs[1], after.logprobs[1]));
  EXPECT_TRUE(same_bytes(before.processed_logprobs[1], after.processed_logprobs[1]));
  EXPECT_EQ(after.processed_logprobs[0].item<float>(), 0);
  EXPECT_LT(after.logprobs[0].item<float>(), 0);
}

TEST(ShiftedLogits, TheLastTokenOfABadWordIsNotDrawnBehindTheOthers) {
  const auto row = at::tensor({0.0F, 1.0F, 5.0F, 4.0F, 3.0F});
  const SamplingParams params{.temperature = 0, .bad_words_token_ids = {{2}, {0, 1, 3}}};
  const auto token_behind = [&](const std::vector<std::int64_t>& output) {
    const SamplingRow one{.params = &params, .output = output};
    return sample(row.unsqueeze(0), 5, {&one, 1}).tokens.item<std::int64_t>();
  };
  EXPECT_EQ(token_behind({}), 3);
  EXPECT_EQ(token_behind({1}), 3);
  EXPECT_EQ(token_behind({4, 0, 1}), 4);
  EXPECT_EQ(token_behind({0, 1, 4}), 3);
}

}  // namespace shifted_logits_test
}  // namespace ferry::rollout
