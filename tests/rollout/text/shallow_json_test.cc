#include "rollout/text/shallow_json.h"

#include <gtest/gtest.h>

#include <string>

namespace ferry::rollout::text {
namespace shallow_json_test {

std::string nested(int depth) {
  const auto size = static_cast<std::size_t>(depth);
  return std::string(size, '[') + std::string(size, ']');
}

TEST(ShallowJson, TakesWhatNestsUpToTheLimit) {
  EXPECT_FALSE(nests_deeply(nested(kDeepestJson)));
  EXPECT_TRUE(parse_shallow_json(nested(kDeepestJson)).is_array());
  EXPECT_TRUE(nests_deeply(nested(kDeepestJson + 1)));
  EXPECT_TRUE(parse_shallow_json(nested(kDeepestJson + 1)).is_discarded());
}

TEST(ShallowJson, CountsNoBracketsOfStrings) {
  const auto text = "{\"a\": \"" + std::string(500, '[') + "\\\"" + std::string(500, '{') + "\"}";
  EXPECT_FALSE(nests_deeply(text));
  EXPECT_EQ(parse_shallow_json(text)["a"].get<std::string>().size(), 1001U);
}

TEST(ShallowJson, CountsOpenBracketsAlone) {
  std::string text = "[";
  for (int i = 0; i < 500; ++i) text += "[],";
  EXPECT_FALSE(nests_deeply(text + "0]"));
}

TEST(ShallowJson, KeepsTheOrderOfKeys) {
  EXPECT_EQ(parse_shallow_json(R"({"b": 1, "a": 2})").dump(), R"({"b":1,"a":2})");
}

TEST(ShallowJson, DiscardsWhatIsNoJson) {
  EXPECT_TRUE(parse_shallow_json("{\"a\": }").is_discarded());
  EXPECT_TRUE(parse_shallow_json("").is_discarded());
}

TEST(ShallowJson, DiscardsALongTextWithAKeyTwice) {
  const auto filled = "\"" + std::string(20000, 'x') + "\"";
  EXPECT_TRUE(parse_shallow_json("{\"a\": " + filled + ", \"a\": 1}").is_discarded());
  EXPECT_EQ(parse_shallow_json("{\"a\": " + filled + ", \"b\": 1}").size(), 2U);
}

}  // namespace shallow_json_test
}  // namespace ferry::rollout::text
