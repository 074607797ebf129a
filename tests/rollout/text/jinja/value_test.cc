#include "rollout/text/jinja/value.h"

#include <gtest/gtest.h>

#include <cmath>

#include "rollout/text/shallow_json.h"
#include "tests/support/expect.h"

namespace ferry::rollout::text::jinja {
namespace value_test {

using nlohmann::ordered_json;
using support::fails;

TEST(Value, ReprOfAStringPrefersSingleQuotes) {
  EXPECT_EQ(Value("it").repr(), "'it'");
  EXPECT_EQ(Value("it's").repr(), "\"it's\"");
  EXPECT_EQ(Value("'\"").repr(), "'\\'\"'");
}

TEST(Value, ReprEscapesWhatIsNotPrintable) {
  EXPECT_EQ(Value("\n\u00A0\u200B\u00E9").repr(), "'\\n\\xa0\\u200b\u00E9'");
}

TEST(Value, ReprOfAFloatHasAPoint) {
  EXPECT_EQ(Value(2.0).repr(), "2.0");
  EXPECT_EQ(Value(0.1).repr(), "0.1");
}

TEST(Value, ReprOfInfinityAndNan) {
  EXPECT_EQ(Value(-INFINITY).repr(), "-inf");
  EXPECT_EQ(Value(NAN).repr(), "nan");
}

TEST(Value, ReprOfATupleOfOneHasAComma) {
  EXPECT_EQ(Value(List{.items = {std::int64_t{1}}, .is_tuple = true}).repr(), "(1,)");
}

TEST(Value, EmptyValuesAreFalse) {
  EXPECT_FALSE(Value("").truthy());
  EXPECT_FALSE(Value(List{}).truthy());
  EXPECT_FALSE(Value(Dict{}).truthy());
  EXPECT_FALSE(Value(Undefined{}).truthy());
}

TEST(Value, ANamespaceIsTrue) {
  EXPECT_TRUE(Value(Dict{.is_namespace = true}).truthy());
}

TEST(Value, DictionariesAreEqualInAnyOrder) {
  EXPECT_EQ(Value::of_json({{"a", 1}, {"b", 2}}), Value::of_json({{"b", 2}, {"a", 1}}));
}

TEST(Value, ListsAreOrderedByTheirFirstDifference) {
  EXPECT_TRUE(less(Value::of_json({1, 2}), Value::of_json({1, 3})));
  EXPECT_TRUE(less(Value::of_json({1}), Value::of_json({1, 0})));
}

TEST(Value, IterationOfADictionaryGivesItsKeys) {
  const auto keys = Value::of_json({{"b", 1}, {"a", 2}}).iterate();
  ASSERT_EQ(keys.size(), 2);
  EXPECT_EQ(keys[0], Value("b"));
}

TEST(Value, ANumberCannotBeIterated) {
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"'int' object is not iterable"},
                    [] { Value(std::int64_t{1}).iterate(); }));
}

TEST(Value, LengthCountsCharacters) {
  EXPECT_EQ(Value("a\u00E9\U0001F600").length(), 3);
}

TEST(Value, AnIntegerBeyond64BitsKeepsItsDigits) {
  const std::string digits = "-18446744073709551617";
  const auto wide = Value::of_json(wide_integer(digits));
  EXPECT_EQ(wide.str(), digits);
  EXPECT_EQ(to_json(List{{wide}}, {}), "[" + digits + "]");
  EXPECT_EQ(wide.type_name(), "int");
  EXPECT_TRUE(wide.truthy());
  EXPECT_EQ(wide, Value::of_json(wide_integer(digits)));
  EXPECT_EQ(Value::of_json(ordered_json::parse("18446744073709551615")).str(),
            "18446744073709551615");
}

TEST(Value, JsonMaySortItsKeys) {
  EXPECT_EQ(to_json(Value::of_json({{"b", 1}, {"a", 2}}), {.sort_keys = true}),
            R"({"a": 2, "b": 1})");
}

TEST(Value, JsonInAsciiHasPairsOfSurrogates) {
  EXPECT_EQ(to_json(Value("\u00E9\U0001F600"), {.ensure_ascii = true}), R"("\u00e9\ud83d\ude00")");
}

TEST(Value, JsonKeepsWhatIsNotAscii) {
  EXPECT_EQ(to_json(Value("\u00E9\x01"), {}), "\"\u00E9\\u0001\"");
}

TEST(Value, AnUndefinedValueIsNoJson) {
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"Undefined is not JSON serializable"},
                    [] { to_json(Value(Undefined{}), {}); }));
}

TEST(Value, JsonOfDeepValuesIsRefused) {
  Value value;
  for (int i = 0; i < 300; ++i) value = List{.items = {value}};
  EXPECT_TRUE(
      fails(ErrorKind::kUsage, {"a value is nested too deep"}, [&] { to_json(value, {}); }));
}

}  // namespace value_test
}  // namespace ferry::rollout::text::jinja
