// Texts that formats allow, byte by byte, without a vocabulary.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "distckpt/base/error.h"
#include "rollout/grammar/automaton.h"
#include "rollout/grammar/format.h"
#include "rollout/grammar/json_schema.h"
#include "rollout/grammar/number_range.h"
#include "rollout/grammar/regex_expression.h"

namespace ferry::rollout::grammar {
namespace grammar_test {

using nlohmann::ordered_json;

bool fits(Automaton& automaton, std::string_view text) {
  auto state = automaton.start();
  for (const char byte : text) {
    state = automaton.next(state, static_cast<std::uint8_t>(byte));
    if (state == Automaton::kDead) return false;
  }
  return automaton.accepts(state);
}

bool fits(const Rules& rules, std::string_view text) {
  Automaton automaton(make_program(rules));
  return fits(automaton, text);
}

Rules rules_of_schema(std::string_view schema) {
  Rules rules;
  const auto first = rules.declare();
  rules.define(first, json_schema(ordered_json::parse(schema), "", rules));
  return rules;
}

bool fits_schema(std::string_view schema, std::string_view text) {
  return fits(rules_of_schema(schema), text);
}

bool fits_regex(std::string_view pattern, std::string_view text) {
  Rules rules;
  rules.add(regex_expression(pattern));
  return fits(rules, text);
}

std::string refusal_of(std::string_view schema) {
  try {
    make_program(rules_of_schema(schema));
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(JsonSchema, TakesMembersInTheOrderOfItsProperties) {
  constexpr auto kSchema =
      R"({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "null"}, "c": {}}, "required": ["b"]})";
  EXPECT_TRUE(fits_schema(kSchema, R"({"a": 1, "b": null, "c": [{"x": "y"}, true]})"));
  EXPECT_TRUE(fits_schema(kSchema, "{\n  \"b\":null\n}"));
  EXPECT_FALSE(fits_schema(kSchema, R"({"b": null, "a": 1})"));
  EXPECT_FALSE(fits_schema(kSchema, R"({"a": 1})"));
  EXPECT_FALSE(fits_schema(kSchema, R"({"a": 1,, "b": null})"));
  EXPECT_FALSE(fits_schema(kSchema, R"({"b": null, "d": 1})"));
}

TEST(JsonSchema, TakesAnyValueOfARequiredNameThatIsNoProperty) {
  constexpr auto kSchema =
      R"({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["z"]})";
  EXPECT_TRUE(fits_schema(kSchema, R"({"a": 1, "z": [null]})"));
  EXPECT_TRUE(fits_schema(kSchema, R"({"z": "x"})"));
  EXPECT_FALSE(fits_schema(kSchema, R"({"a": 1})"));
  EXPECT_FALSE(fits_schema(kSchema, R"({"z": 1, "y": 1})"));
}

TEST(JsonSchema, GivesOtherMembersNamesThatAreNotListed) {
  constexpr auto kSchema =
      R"({"properties": {"ab": {"type": "integer"}}, "additionalProperties": {"type": "boolean"}})";
  EXPECT_TRUE(fits_schema(kSchema, R"({"ab": 1, "a": true, "abc": false, "é": true})"));
  EXPECT_TRUE(fits_schema(kSchema, R"({"b": true})"));
  EXPECT_FALSE(fits_schema(kSchema, R"({"ab": true})"));
  EXPECT_FALSE(fits_schema(kSchema, R"({"b": true, "ab": true})"));
  EXPECT_FALSE(fits_schema(kSchema, R"({"\u0061b": true})"));
}

TEST(JsonSchema, CountsTheItemsOfAnArray) {
  constexpr auto kSchema =
      R"({"type": "array", "prefixItems": [{"type": "null"}], "items": {"type": "integer"}, "minItems": 2, "maxItems": 3})";
  EXPECT_FALSE(fits_schema(kSchema, "[]"));
  EXPECT_FALSE(fits_schema(kSchema, "[null]"));
  EXPECT_TRUE(fits_schema(kSchema, "[null, 1]"));
  EXPECT_TRUE(fits_schema(kSchema, "[ null,1 ,2 ]"));
  EXPECT_FALSE(fits_schema(kSchema, "[null, 1, 2, 3]"));
  EXPECT_FALSE(fits_schema(kSchema, "[1, 1]"));
  EXPECT_TRUE(fits_schema(R"({"type": "array", "maxItems": 0})", "[]"));
  EXPECT_FALSE(fits_schema(R"({"type": "array", "maxItems": 0})", "[1]"));
  EXPECT_TRUE(fits_schema(
      R"({"type": "array", "minItems": 1, "items": false, "prefixItems": [{}]})", "[1]"));
}

TEST(JsonSchema, CountsTheCharactersOfAString) {
  constexpr auto kSchema = R"({"type": "string", "minLength": 2, "maxLength": 3})";
  EXPECT_FALSE(fits_schema(kSchema, R"("é")"));
  EXPECT_TRUE(fits_schema(kSchema, R"("é漢")"));
  EXPECT_TRUE(fits_schema(kSchema, R"("\n\u00e9👍")"));
  EXPECT_FALSE(fits_schema(kSchema, R"("abcd")"));
  EXPECT_FALSE(fits_schema(kSchema, R"("a\ud83d")"));
  EXPECT_FALSE(fits_schema(kSchema, "\"a\xC3\""));
}

TEST(JsonSchema, SearchesAPatternInAStringAsJsonWritesIt) {
  EXPECT_TRUE(fits_schema(R"({"pattern": "^a\\d+[\"x]$"})", R"("a12\"")"));
  EXPECT_FALSE(fits_schema(R"({"pattern": "^a\\d+[\"x]$"})", R"("a12"")"));
  EXPECT_TRUE(fits_schema(R"({"pattern": "b|^c"})", R"("abz")"));
  EXPECT_FALSE(fits_schema(R"({"pattern": "b|^c"})", R"("ac")"));
  EXPECT_FALSE(fits_schema(R"({"pattern": "^\\d$"})", "\"\xD9\xA1\""));  // an Arabic one
}

TEST(JsonSchema, HoldsNumbersToTheirBounds) {
  constexpr auto kIntegers = R"({"type": "integer", "minimum": -12, "exclusiveMaximum": 305})";
  Automaton integers(make_program(rules_of_schema(kIntegers)));
  for (int i = -130; i < 1400; ++i)
    EXPECT_EQ(fits(integers, std::to_string(i)), i >= -12 && i < 305) << i;
  constexpr auto kNumbers = R"({"type": "number", "exclusiveMinimum": -0.5, "maximum": 1.25})";
  Automaton numbers(make_program(rules_of_schema(kNumbers)));
  for (int i = -2000; i < 3000; i += 7) {
    const auto text = fmt::format("{:.3f}", i / 1000.0);
    EXPECT_EQ(fits(numbers, text), i > -500 && i <= 1250 && text != "-0.000") << text;
  }
  EXPECT_FALSE(fits_schema(kNumbers, "-0.5"));
  EXPECT_TRUE(fits_schema(kNumbers, "1.25"));
  EXPECT_FALSE(fits_schema(kNumbers, "1.2501"));
  EXPECT_TRUE(fits_schema(R"({"type": "number", "minimum": 1e3})", "1000"));
  EXPECT_FALSE(fits_schema(R"({"type": "number", "minimum": 1e3})", "999.9"));
}

TEST(JsonSchema, FindsNumbersBetweenBoundsThatAreExcludedAndClose) {
  constexpr auto kRates =
      R"({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.0001})";
  EXPECT_TRUE(fits_schema(kRates, "0.00003"));
  EXPECT_FALSE(fits_schema(kRates, "0.0001"));
  EXPECT_FALSE(fits_schema(kRates, "0.00000"));
  EXPECT_TRUE(
      fits_schema(R"({"type": "number", "exclusiveMinimum": 0.12345, "exclusiveMaximum": 0.12346})",
                  "0.123456"));
}

TEST(JsonSchema, TakesWhatContainsItself) {
  constexpr auto kSchema =
      R"({"$defs": {"tree": {"type": "object", "properties": {"left": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}}, "required": ["left"]}}, "$ref": "#/$defs/tree"})";
  EXPECT_TRUE(fits_schema(kSchema, R"({"left": {"left": {"left": null}}})"));
  EXPECT_FALSE(fits_schema(kSchema, R"({"left": {"left": {}}})"));
}

TEST(JsonSchema, MergesSchemasThatHoldTogether) {
  constexpr auto kSchema =
      R"({"allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"properties": {"b": {"const": 1}}, "required": ["b"]}]})";
  EXPECT_TRUE(fits_schema(kSchema, R"({"a": 5, "b": 1})"));
  EXPECT_FALSE(fits_schema(kSchema, R"({"a": 5})"));
}

TEST(JsonSchema, NamesTheKeywordThatItDoesNotSupport) {
  EXPECT_THAT(refusal_of(R"({"properties": {"a": {"type": "number", "multipleOf": 0.5}}})"),
              testing::HasSubstr("multipleOf at #/properties/a is not supported"));
  EXPECT_THAT(refusal_of(R"({"not": {}})"), testing::HasSubstr("not at # is not supported"));
  EXPECT_THAT(refusal_of(R"_({"type": "string", "pattern": "(?=a)"})_"),
              testing::HasSubstr("pattern at #"));
  EXPECT_THAT(refusal_of(R"({"oneOf": [{"type": "integer"}, {"type": "number"}]})"),
              testing::HasSubstr("oneOf"));
  EXPECT_THAT(refusal_of(R"({"enum": [1], "type": "string"})"), testing::HasSubstr("no text fits"));
  EXPECT_THAT(refusal_of(R"({"$ref": "#"})"), testing::HasSubstr("no text fits"));
  EXPECT_THAT(refusal_of(R"({"anyOf": [{"$ref": "#"}, {"type": "null"}]})"),
              testing::HasSubstr("begins with itself"));
  EXPECT_THAT(refusal_of(R"({"$ref": "other.json"})"), testing::HasSubstr("$ref"));
  EXPECT_EQ(refusal_of(R"({"oneOf": [{"type": "integer"}, {"type": "string"}], "title": "x"})"),
            "");
}

TEST(JsonSchema, ReadsAReferenceAsTheUriThatItIs) {
  constexpr auto kSchema =
      R"({"$defs": {"a b/é%": {"const": 1}}, "$ref": "#/$defs/a%20b~1%C3%A9%"})";
  EXPECT_TRUE(fits_schema(kSchema, "1"));
}

// Schemas of a few hundred bytes that would be merged a million times, or compared for half a
// minute.
TEST(JsonSchema, RefusesWhatRefersToItsPartsTooOften) {
  auto schema =
      ordered_json::parse(R"({"$defs": {"d0": {"properties": {"a": {"type": "null"}}}}})");
  for (int i = 1; i <= 20; ++i) {
    const auto below = "#/$defs/d" + std::to_string(i - 1);
    schema["$defs"]["d" + std::to_string(i)]["allOf"] = {{{"$ref", below}, {"minProperties", 0}},
                                                         {{"$ref", below}, {"maxProperties", i}}};
  }
  schema["$ref"] = "#/$defs/d20";
  EXPECT_THAT(refusal_of(schema.dump()), testing::HasSubstr("makes the schema too large"));
  auto many = ordered_json::array();
  for (int i = 0; i < 5000; ++i) many.push_back({{"const", i}});
  EXPECT_THAT(refusal_of(ordered_json{{"oneOf", many}}.dump()),
              testing::HasSubstr("makes the schema too large"));
  many.erase(many.begin() + 500, many.end());
  EXPECT_TRUE(fits_schema(ordered_json{{"oneOf", many}}.dump(), "499"));
}

TEST(RegexExpression, MatchesTheWholeText) {
  EXPECT_TRUE(fits_regex("(Yes|No), [a-z]{2,3}!?", "Yes, abc!"));
  EXPECT_FALSE(fits_regex("(Yes|No), [a-z]{2,3}!?", "Yes, a!"));
  EXPECT_TRUE(fits_regex("^\\w+\\.$", "ab_1."));
  EXPECT_TRUE(fits_regex("[^a]", "漢"));
  EXPECT_FALSE(fits_regex("[^a]", "a"));
  EXPECT_THROW(fits_regex("a^b", "a"), Error);
}

TEST(TextWithout, EndsWhereTheTextBegins) {
  Rules rules;
  const auto first = rules.declare();
  rules.define(first, sequence({text_without("</a></b>", rules), literal("</a></b>")}));
  EXPECT_TRUE(fits(rules, "x</a></a></b>"));
  EXPECT_TRUE(fits(rules, "漢</a></b>"));
  EXPECT_FALSE(fits(rules, "x</a></b></a></b>"));
}

}  // namespace grammar_test
}  // namespace ferry::rollout::grammar
