// Rows that go from the ranks that made them to those that compute with them.
#include "trainer/workers/row_parcels.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "distckpt/base/cbor.h"
#include "tests/support/expect.h"

namespace ferry::trainer {
namespace row_parcels_test {

// Rows with these numbers as the values of their responses, row i of i + 1 tokens.
RolloutBatch rows(const std::vector<float>& numbers) {
  std::vector<RolloutBatch::Tokens> prompts, responses;
  std::vector<float> values;
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    prompts.push_back({1});
    responses.emplace_back(i + 1, 2);
    values.insert(values.end(), i + 1, numbers[i]);
  }
  auto batch = RolloutBatch::of(prompts, responses);
  batch.values = at::tensor(values);
  return batch;
}

// The batch that rank 0 has when the ranks have answered.
RolloutBatch placed(const RolloutBatch& batch,
                    const std::map<std::string, std::string>& columns,
                    const std::vector<RolloutBatch::Place>& places) {
  auto known = batch.without_columns();
  known.kept.push_back({.columns = columns, .places = places});
  return known;
}

TEST(RowParcels, BringEachReceiverItsRowsInItsOrder) {
  // Rows 0 and 2 are answer 7 of rank 1, rows 1 and 3 are answer 8 of rank 2.
  auto whole = rows({10, 11, 12, 13});
  std::map<int, KeptRows> ranks;
  for (const auto& [rank, answer, mine] :
       {std::tuple{1, 7, std::vector<std::int64_t>{0, 2}}, {2, 8, {1, 3}}}) {
    auto part = whole.select(mine);
    EXPECT_EQ(ranks[rank].keep(answer, part),
              (std::vector<std::string>{"tokens", "response_mask", "values"}));
    EXPECT_FALSE(part.values.defined());
  }
  const auto known = placed(whole, {{"values", "values"}, {"returns", "values"}},
                            {{7, 1, 0}, {8, 2, 0}, {7, 1, 1}, {8, 2, 1}});
  const std::map<int, RolloutBatch::Rows> receivers{{0, {3, 2, 2}}, {1, {0}}};
  const auto parcels = plan_parcels(known, receivers);
  ASSERT_EQ(parcels.size(), 3);
  for (const auto& [to, asked] : receivers) {
    auto given = known.select(asked);
    given.kept.clear();
    std::vector<RowParcel> mine;
    std::vector<std::vector<RolloutBatch>> found;
    for (const auto& parcel : parcels) {
      if (parcel.to != to) continue;
      mine.push_back(parcel);
      found.push_back(
          from_cbor<std::vector<RolloutBatch>>(to_cbor(ranks.at(parcel.from).find(parcel))));
    }
    add_columns(given, mine, found);
    EXPECT_TRUE(at::equal(given.values, whole.select(asked).values)) << to;
    EXPECT_TRUE(at::equal(given.returns, given.values)) << to;
    EXPECT_FALSE(given.tokens.defined());
  }
}

TEST(KeptRows, LeavesWhatTurnsHaveEarnedToRank0) {
  auto batch = rows({1, 2});
  batch.turn_scores = at::ones({3});
  EXPECT_EQ(KeptRows().keep(1, batch),
            (std::vector<std::string>{"tokens", "response_mask", "values"}));
  EXPECT_TRUE(at::equal(batch.turn_scores, at::ones({3})));
}

TEST(KeptRows, ForgetsAnswersThatNobodyAsksFor) {
  KeptRows kept;
  for (const std::int64_t answer : {1, 2}) {
    auto batch = rows({1});
    (void)kept.keep(answer, batch);
  }
  kept.keep_only(std::vector<std::int64_t>{2});
  const auto parcel = [](std::int64_t answer) {
    return RowParcel{
        .pieces = {{.answer = answer, .columns = {{"values", "values"}}, .rows = {0}}}};
  };
  EXPECT_EQ(kept.find(parcel(2)).size(), 1);
  EXPECT_TRUE(support::fails(ErrorKind::kBug, {"does not keep answer 1"},
                             [&] { (void)kept.find(parcel(1)); }));
}

// Rank 0 selects, joins and renames what it does not have.
TEST(RolloutBatch, KnowsWhereItsColumnsAreKept) {
  const auto whole = rows({10, 11});
  const auto lease = std::make_shared<char>();
  auto batch = placed(whole, {{"values", "values"}, {"tokens", "tokens"}}, {{1, 0, 0}, {1, 3, 0}});
  batch.kept.front().leases = {lease};
  const auto both =
      RolloutBatch::concat(std::vector{batch, batch.select(std::vector<std::int64_t>{1})});
  ASSERT_EQ(both.kept.size(), 1);
  EXPECT_EQ(both.kept[0].places,
            (std::vector<RolloutBatch::Place>{{1, 0, 0}, {1, 3, 0}, {1, 3, 0}}));
  EXPECT_EQ(both.kept[0].leases.size(), 1);
  EXPECT_EQ(both.lengths(), (std::vector<std::int64_t>{2, 3, 3}));
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"are kept"}, [&] {
    (void)RolloutBatch::concat(std::vector{batch, whole.without_columns()});
  }));

  batch.alias(&RolloutBatch::returns, &RolloutBatch::values);
  auto asked = batch.without_columns();
  batch.give(asked, &RolloutBatch::returns);
  ASSERT_EQ(asked.kept.size(), 1);
  EXPECT_EQ(asked.kept[0].columns, (std::map<std::string, std::string>{{"returns", "values"}}));

  auto answer = whole.without_columns();
  answer.values = whole.values;  // known from now on
  batch.take(answer);
  EXPECT_TRUE(at::equal(batch.values, whole.values));
  for (const auto& kept : batch.kept) EXPECT_FALSE(kept.columns.contains("values"));
}

}  // namespace row_parcels_test
}  // namespace ferry::trainer
