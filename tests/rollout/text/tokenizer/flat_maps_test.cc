#include "rollout/text/tokenizer/flat_maps.h"

#include <gtest/gtest.h>

#include <string>

namespace ferry::rollout::text {
namespace flat_maps_test {

TEST(MergeTable, FindsTheMergesThatWereSet) {
  MergeTable table(1000);
  for (TokenId i = 0; i < 1000; ++i) {
    table.set(i, i + 1, {.rank = static_cast<std::uint32_t>(i), .id = 5000 + i});
  }
  for (TokenId i = 0; i < 1000; ++i) EXPECT_EQ(table.find(i, i + 1).id, 5000 + i);
}

TEST(MergeTable, APairThatWasNotSetHasNoRank) {
  MergeTable table(1);
  table.set(1, 2, {.rank = 0, .id = 3});
  EXPECT_EQ(table.find(2, 1).rank, MergeTable::kNoRank);
}

TEST(MergeTable, TheLaterOfTwoMergesStays) {
  MergeTable table(2);
  table.set(1, 2, {.rank = 0, .id = 3});
  table.set(1, 2, {.rank = 1, .id = 4});
  EXPECT_EQ(table.find(1, 2).rank, 1);
}

TEST(TokenTable, FindsTheTextsThatWereInserted) {
  std::vector<std::string> texts;
  for (int i = 0; i < 1000; ++i) texts.push_back(std::to_string(i * i));
  TokenTable table(texts.size());
  for (std::size_t i = 0; i < texts.size(); ++i) table.insert(texts[i], static_cast<TokenId>(i));
  for (std::size_t i = 0; i < texts.size(); ++i) {
    EXPECT_EQ(table.find(texts[i]), static_cast<TokenId>(i));
  }
}

TEST(TokenTable, ATextIsInsertedOnce) {
  TokenTable table(2);
  EXPECT_TRUE(table.insert("a", 1));
  EXPECT_FALSE(table.insert("a", 2));
  EXPECT_EQ(table.find("a"), 1);
}

TEST(TokenTable, AnUnknownTextHasNoToken) {
  EXPECT_EQ(TokenTable(1).find("a"), kNoToken);
}

TEST(PairFilter, NeverDeniesAPairThatItHolds) {
  PairFilter filter(500);
  for (char32_t c = 0; c < 500; ++c) filter.insert(c, c * 7);
  for (char32_t c = 0; c < 500; ++c) EXPECT_TRUE(filter.may_contain(c, c * 7));
}

TEST(PairFilter, DeniesMostPairsThatItDoesNotHold) {
  PairFilter filter(500 * 16);
  for (char32_t c = 0; c < 500; ++c) filter.insert(c, c * 7);
  int claimed = 0;
  for (char32_t c = 1000; c < 2000; ++c) claimed += filter.may_contain(c, c) ? 1 : 0;
  EXPECT_LT(claimed, 100);
}

}  // namespace flat_maps_test
}  // namespace ferry::rollout::text
