#include "trainer/rewards/rules/search_r1.h"

#include <gtest/gtest.h>

#include <string>

namespace ferry::trainer::search_r1 {
namespace search_r1_test {

TEST(SearchR1, ComparesWithoutCasePunctuationAndArticles) {
  EXPECT_EQ(compute_score("<answer> The  U.S.A.! </answer>", {"usa"}), 1);
  EXPECT_EQ(compute_score("<answer>an apple a day</answer>", {"Apple\tday"}), 1);
  EXPECT_EQ(compute_score("<answer>another</answer>", {"other"}), 0);
}

TEST(SearchR1, ReadsTheLastAnswer) {
  EXPECT_EQ(compute_score("<answer>1</answer> no: <answer>2</answer>", {"2"}), 1);
  EXPECT_EQ(compute_score("<answer>1</answer> <answer>2", {"1"}), 1);
  EXPECT_EQ(compute_score("2", {"2"}), 0);
}

TEST(SearchR1, TakesThreeQuartersFromAnAnswerOfManyTags) {
  std::string many;
  for (int i = 0; i < 11; ++i) many += "</answer>";
  EXPECT_EQ(compute_score("<answer>2</answer>" + many, {"2"}), 0.25);
}

TEST(SearchR1, LowersASigmaAtTheEndOfAWordLikePython) {
  EXPECT_EQ(compute_score("<answer>ΣΟΦΟΣ ΣΑΣ</answer>", {"σοφος σας"}), 1);
}

TEST(SearchR1, ReadsTargetsOfTextToo) {
  EXPECT_EQ(targets_of(R"({"target": ["a", "b"]})").size(), 2U);
}

}  // namespace search_r1_test
}  // namespace ferry::trainer::search_r1
