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

// The places of wide integers, "a.1=18446744073709551616 " for each.
std::string wide_integers(std::string_view json, std::size_t most = 100) {
  std::string found;
  visit_wide_integers(json, [&](const WideIntegerPlace& place) {
    for (const auto& step : place.path) found += (&step == &place.path.front() ? "" : ".") + step;
    found += "=" + place.digits + " ";
    return --most > 0;
  });
  return found;
}

TEST(WideInteger, IsAnIntegerBeyond64Bits) {
  EXPECT_EQ(wide_integers("[18446744073709551615, -9223372036854775808]"), "");
  EXPECT_EQ(wide_integers("[18446744073709551616, -9223372036854775809]"),
            "0=18446744073709551616 1=-9223372036854775809 ");
  EXPECT_EQ(wide_integers("[1e30, 18446744073709551616.0, \"18446744073709551616\"]"), "");
  EXPECT_EQ(wide_integers("no JSON 18446744073709551616"), "");
}

TEST(WideInteger, HasAPlace) {
  const auto json =
      R"({"a": [{}, 1, {"b": [2.5, 18446744073709551616]}], "c": 18446744073709551617})";
  EXPECT_EQ(wide_integers(json), "a.2.b.1=18446744073709551616 c=18446744073709551617 ");
  EXPECT_EQ(wide_integers(json, 1), "a.2.b.1=18446744073709551616 ");
}

TEST(WideInteger, KeepsItsDigits) {
  const std::string json =
      R"({"a":[{},1.5,"é",{"b":-123456789012345678901234567890}],"c":1e+30,"d":null,"e":[]})";
  const auto value = parse_exact_json(json);
  EXPECT_TRUE(is_wide_integer(value["a"][3]["b"]));
  EXPECT_EQ(json_text(value), json);
}

TEST(WideInteger, IsNoOtherValueOfItsKey) {
  EXPECT_EQ(json_text(parse_exact_json(R"({"a":18446744073709551616,"a":[1]})")), R"({"a":[1]})");
  EXPECT_EQ(json_text(parse_exact_json(R"({"a":{"b":18446744073709551616},"a":1})")), R"({"a":1})");
}

TEST(JsonText, IsThatOfNlohmann) {
  const std::string bytes = "\xff\"\n";
  const nlohmann::ordered_json value{
      {bytes, {1, -2.5, true, nullptr, bytes, nlohmann::ordered_json::object()}}};
  EXPECT_EQ(json_text(value),
            value.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
}

}  // namespace shallow_json_test
}  // namespace ferry::rollout::text
