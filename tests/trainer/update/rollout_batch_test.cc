// Ragged rows beside the padded matrices that they stand for, with masks that have holes.
#include "trainer/update/rollout_batch.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "tests/support/expect.h"

namespace ferry::trainer {
namespace rollout_batch_test {

using support::fails;
using Rows = RolloutBatch::Rows;

constexpr std::int64_t kPrompt = 7, kResponse = 9;

// Rows of random lengths, responses without a token among them, with columns of each kind.
RolloutBatch random_batch(std::mt19937_64& random, std::int64_t rows) {
  const auto tokens = [&](std::int64_t least, std::int64_t most) {
    RolloutBatch::Tokens some(static_cast<std::size_t>(
        least +
        static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(most - least + 1))));
    for (auto& token : some) token = static_cast<std::int64_t>(random() % 100);  // 0 is one, too
    return some;
  };
  std::vector<RolloutBatch::Tokens> prompts, responses;
  for (std::int64_t row = 0; row < rows; ++row) {
    prompts.push_back(tokens(1, kPrompt));
    responses.push_back(tokens(0, kResponse));
  }
  auto batch = RolloutBatch::of(prompts, responses);
  batch.max_prompt_length = kPrompt;
  batch.max_response_length = kResponse;
  const auto count = batch.response_offsets.back();
  batch.response_mask = at::rand({count}) < 0.7;
  batch.old_log_probs = -at::rand({count});
  batch.routed_experts = at::randint(8, {batch.offsets.back(), 3, 2}).to(at::kByte);
  batch.seeds = at::arange(rows, at::kLong) + (std::int64_t{1} << 40);
  std::vector<std::int64_t> kept;
  batch.sampling_mask.offsets = {0};
  for (std::int64_t i = 0; i < count; ++i) {
    for (std::uint64_t k = random() % 4; k > 0; --k)
      kept.push_back(static_cast<std::int64_t>(random() % 50));
    batch.sampling_mask.offsets.push_back(static_cast<std::int64_t>(kept.size()));
  }
  batch.sampling_mask.token_ids = at::tensor(kept, at::kLong);
  for (std::int64_t row = 0; row < rows; ++row) {
    batch.uid.push_back("group " + std::to_string(row / 2));
    batch.reward_extra_info.push_back({{"acc", row}, {"text", "\xff"}});
  }
  return batch;
}

// A row as a naive, padded implementation has it.
struct Padded {
  at::Tensor tokens, mask, log_probs, routes, seed;
  std::vector<std::vector<std::int64_t>> kept{};
  std::string uid;
};

Padded padded_row(const RolloutBatch& batch, std::int64_t row) {
  Padded padded{.tokens = at::full({kPrompt + kResponse}, -1, at::kLong),
                .mask = at::zeros({kResponse}, at::kBool),
                .log_probs = at::zeros({kResponse}),
                .routes = at::zeros({kPrompt + kResponse, 3, 2}, at::kByte),
                .seed = batch.seeds[row],
                .uid = batch.uid[static_cast<std::size_t>(row)]};
  const auto prompt = batch.prompt(row), response = batch.response(row);
  const auto prompt_length = static_cast<std::int64_t>(prompt.size());
  std::vector<std::int64_t> all(prompt.begin(), prompt.end());
  all.insert(all.end(), response.begin(), response.end());
  padded.tokens.narrow(0, kPrompt - prompt_length, batch.length(row))
      .copy_(at::tensor(all, at::kLong));
  padded.routes.narrow(0, kPrompt - prompt_length, batch.length(row))
      .copy_(batch.routed_experts.narrow(0, batch.offsets[static_cast<std::size_t>(row)],
                                         batch.length(row)));
  for (std::int64_t t = 0; t < batch.response_length(row); ++t) {
    const auto place = batch.response_offsets[static_cast<std::size_t>(row)] + t;
    padded.mask[t] = batch.response_mask[place];
    padded.log_probs[t] = batch.old_log_probs[place];
    const auto ids = batch.sampling_mask.rows(place, 1).token_ids;
    padded.kept.emplace_back(ids.const_data_ptr<std::int64_t>(),
                             ids.const_data_ptr<std::int64_t>() + ids.numel());
  }
  return padded;
}

void expect_same(const Padded& got, const Padded& expected) {
  EXPECT_TRUE(at::equal(got.tokens, expected.tokens));
  EXPECT_TRUE(at::equal(got.mask, expected.mask));
  EXPECT_TRUE(at::equal(got.log_probs, expected.log_probs));
  EXPECT_TRUE(at::equal(got.routes, expected.routes));
  EXPECT_TRUE(at::equal(got.seed, expected.seed));
  EXPECT_EQ(got.kept, expected.kept);
  EXPECT_EQ(got.uid, expected.uid);
}

std::vector<Padded> padded_rows(const RolloutBatch& batch) {
  std::vector<Padded> rows;
  for (std::int64_t row = 0; row < batch.size(); ++row) rows.push_back(padded_row(batch, row));
  return rows;
}

void expect_rows(const RolloutBatch& batch, const std::vector<Padded>& expected) {
  ASSERT_EQ(batch.size(), static_cast<std::int64_t>(expected.size()));
  for (std::int64_t row = 0; row < batch.size(); ++row) {
    SCOPED_TRACE(row);
    expect_same(padded_row(batch, row), expected[static_cast<std::size_t>(row)]);
  }
}

TEST(RolloutBatch, RowsArePromptsAndResponses) {
  const std::vector<RolloutBatch::Tokens> prompts{{1, 2, 3}, {4}}, responses{{5}, {6, 7}};
  const auto batch = RolloutBatch::of(prompts, responses);
  EXPECT_EQ(batch.size(), 2);
  EXPECT_EQ(batch.lengths(), (std::vector<std::int64_t>{4, 3}));
  EXPECT_EQ(batch.prompt_length(0), 3);
  EXPECT_EQ(batch.response_length(1), 2);
  EXPECT_TRUE(std::ranges::equal(batch.prompt(0), prompts[0]));
  EXPECT_TRUE(std::ranges::equal(batch.response(1), responses[1]));
  EXPECT_TRUE(batch.response_mask.all().item<bool>());
  EXPECT_FALSE(RolloutBatch::of(prompts).response_mask.defined());
}

TEST(RolloutBatch, SelectsRowsAsAPaddedBatchDoes) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 30; ++round) {
    const auto batch = random_batch(random, 1 + static_cast<std::int64_t>(random() % 8));
    const auto whole = padded_rows(batch);
    Rows rows;
    std::vector<Padded> expected;
    for (int i = 0; i < round % 7; ++i) {
      rows.push_back(static_cast<std::int64_t>(random() % whole.size()));
      expected.push_back(whole[static_cast<std::size_t>(rows.back())]);
    }
    expect_rows(batch.select(rows), expected);
  }
}

TEST(RolloutBatch, PartsPutTogetherAreTheWhole) {
  std::mt19937_64 random(2);
  for (int round = 0; round < 20; ++round) {
    const auto batch = random_batch(random, 6);
    const auto cut = static_cast<std::int64_t>(random() % 7);
    expect_rows(
        RolloutBatch::concat(std::vector{batch.slice(0, cut), RolloutBatch(), batch.slice(cut, 6)}),
        padded_rows(batch));
  }
}

TEST(RolloutBatch, MatricesThereAndBack) {
  std::mt19937_64 random(3);
  for (int round = 0; round < 20; ++round) {
    const auto batch = random_batch(random, 5);
    const auto matrix = batch.padded(batch.old_log_probs);
    const auto mask = batch.padded(batch.response_mask);
    ASSERT_EQ(matrix.sizes(), (std::vector<std::int64_t>{5, kResponse}));
    for (std::int64_t row = 0; row < 5; ++row) {
      const auto expected = padded_row(batch, row);
      EXPECT_TRUE(at::equal(matrix[row], expected.log_probs));
      EXPECT_TRUE(at::equal(mask[row], expected.mask));
    }
    EXPECT_TRUE(at::equal(batch.ragged(matrix), batch.old_log_probs));
    // Numbers behind the ends are no row's.
    const auto beyond = at::where(batch.padded(at::ones_like(batch.old_log_probs)) == 0,
                                  at::full_like(matrix, 7), matrix);
    EXPECT_TRUE(at::equal(batch.ragged(beyond), batch.old_log_probs));
  }
}

// Place t of a sequence speaks of token t + 1.
TEST(RolloutBatch, PlacesOfResponsesAreOneBefore) {
  const auto batch = RolloutBatch::of(std::vector<RolloutBatch::Tokens>{{1, 2}, {3}},
                                      std::vector<RolloutBatch::Tokens>{{4, 5}, {}});
  const auto found = batch.responses_of({at::tensor({10, 11, 12, 13}), at::tensor({20})});
  EXPECT_TRUE(at::equal(found, at::tensor({11, 12})));
}

TEST(RolloutBatch, TakesTheColumnsOfAnAnswer) {
  std::mt19937_64 random(4);
  auto batch = random_batch(random, 4);
  auto answer = batch.without_columns();
  answer.values = at::rand({batch.response_offsets.back()});
  const auto before = batch;
  batch.take(answer);
  EXPECT_TRUE(at::equal(batch.values, answer.values));
  expect_rows(batch, padded_rows(before));
}

TEST(RolloutBatch, TakesTheResponsesToItsPrompts) {
  const std::vector<RolloutBatch::Tokens> prompts{{1, 2}, {3}}, responses{{4}, {5, 6}};
  auto batch = RolloutBatch::of(prompts);
  batch.uid = {"a", "b"};
  batch.take(RolloutBatch::of(prompts, responses));
  EXPECT_TRUE(std::ranges::equal(batch.response(1), responses[1]));
  EXPECT_EQ(batch.uid, (std::vector<std::string>{"a", "b"}));
}

TEST(RolloutBatch, RefusesAnswersToOtherRows) {
  std::mt19937_64 random(5);
  auto batch = random_batch(random, 4);
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"an answer of 3 rows to 4"},
                    [&] { batch.take(batch.slice(0, 3)); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"responses of other lengths"}, [&] {
    auto other = random_batch(random, 4).without_columns();
    batch.take(other);
  }));
}

TEST(RolloutBatch, RefusesPartsOfUnlikeColumnsAndRowsThatItLacks) {
  std::mt19937_64 random(6);
  const auto batch = random_batch(random, 4);
  auto more = batch;
  more.values = batch.old_log_probs;
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"values is known of 1 parts of 2"}, [&] {
    (void)RolloutBatch::concat(std::vector{batch, more});
  }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"no row 4 of 4"}, [&] { (void)batch.select(Rows{4}); }));
}

TEST(RolloutBatchBytes, BringEverythingBack) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 20; ++round) {
    const auto batch = random_batch(random, static_cast<std::int64_t>(random() % 6));
    const auto bytes = batch.to_bytes();
    const auto back = RolloutBatch::from_bytes(bytes);
    EXPECT_EQ(back.to_bytes(), bytes);
    expect_rows(back, padded_rows(batch));
    EXPECT_EQ(back.reward_extra_info, batch.reward_extra_info);
    EXPECT_EQ(back.max_response_length, kResponse);
    EXPECT_FALSE(back.values.defined());
  }
}

TEST(RolloutBatchBytes, AreThoseOfTokensThatAreThere) {
  std::vector<RolloutBatch::Tokens> prompts, responses;
  for (std::size_t row = 0; row < 64; ++row) {
    prompts.emplace_back(100, 7);
    responses.emplace_back(16 * row, 7);
  }
  auto batch = RolloutBatch::of(prompts, responses);
  batch.old_log_probs = at::rand({batch.response_offsets.back()});
  // Four bytes a token, four a log-probability, one of the mask; and a little that describes it.
  const auto expected = 4 * batch.offsets.back() + 5 * batch.response_offsets.back();
  const auto bytes = static_cast<std::int64_t>(batch.to_bytes().size());
  EXPECT_GE(bytes, expected);
  EXPECT_LT(bytes, expected + 2000);
}

TEST(RolloutBatchBytes, ThatAreCutOffAreNoBatch) {
  std::mt19937_64 random(8);
  const auto bytes = random_batch(random, 3).to_bytes();
  for (std::size_t size = 0; size < bytes.size(); ++size)
    EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"batch: "}, [&] {
      (void)RolloutBatch::from_bytes(std::span(bytes).first(size));
    })) << size;
}

// A column that this program does not know, or another order of columns: they would be missing
// without a word.
TEST(RolloutBatchBytes, HaveNoTensorThatIsNotRead) {
  std::mt19937_64 random(8);
  const auto bytes = random_batch(random, 3).to_bytes();
  const auto renamed = [&](std::string_view from, std::string_view to) {
    auto changed = bytes;
    const auto found = std::ranges::search(changed, std::as_bytes(std::span(from)));
    std::ranges::copy(std::as_bytes(std::span(to)), found.begin());
    return changed;
  };
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"batch: old_log_prabs, "}, [&] {
    (void)RolloutBatch::from_bytes(renamed("old_log_probs", "old_log_prabs"));
  }));
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"batch: vid: no column of that name"},
                    [&] { (void)RolloutBatch::from_bytes(renamed("uid", "vid")); }));
  auto longer = bytes;
  longer.push_back(std::byte{0});
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"1 bytes are behind its tensors"},
                    [&] { (void)RolloutBatch::from_bytes(longer); }));
}

TEST(RolloutBatchBytes, ThatAreDamagedAreABatchOrAnError) {
  std::mt19937_64 random(9);
  const auto bytes = random_batch(random, 3).to_bytes();
  int refused = 0;
  for (int round = 0; round < 2000; ++round) {
    auto damaged = bytes;
    damaged[random() % damaged.size()] ^= static_cast<std::byte>(1U << random() % 8);
    try {
      (void)RolloutBatch::from_bytes(damaged);
    } catch (const Error& error) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 500);
}

}  // namespace rollout_batch_test
}  // namespace ferry::trainer
