// Texts that formats allow, byte by byte, without a vocabulary.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
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

TEST(JsonSchema, EscapesInNamesOfOtherMembersWhatJsonEscapes) {
  constexpr auto kSchema =
      R"({"properties": {"a\"b": {"type": "null"}, "\\": {}, "\n": {}, "\"": {}},
                               "additionalProperties": {"type": "integer"}})";
  for (const char* text : {R"({"a\"": 1})", R"({"a\"c": 1})", R"({"a": 1})", R"({"\\n": 1})",
                           R"({"\nn": 1})", R"({"\"n": 1})", R"({"a\"b": null})"})
    EXPECT_TRUE(fits_schema(kSchema, text)) << text;
  for (const char* text : {R"({"a"": 1})", R"({"a"}": 1})", R"({"\": 1})", "{\"\n\": 1}",
                           R"({""": 1})", R"({"a\"b": 1})"})
    EXPECT_FALSE(fits_schema(kSchema, text)) << text;
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

TEST(JsonSchema, TakesMultiplesOfAWholeNumber) {
  Automaton sevens(make_program(rules_of_schema(R"({"type": "integer", "multipleOf": 7})")));
  Automaton bounded(make_program(
      rules_of_schema(R"({"minimum": -50, "exclusiveMaximum": 330, "multipleOf": 30.0})")));
  for (int i = -400; i < 1400; ++i) {
    EXPECT_EQ(fits(sevens, std::to_string(i)), i % 7 == 0) << i;
    EXPECT_EQ(fits(bounded, std::to_string(i)), i % 30 == 0 && i >= -50 && i < 330) << i;
  }
  EXPECT_FALSE(fits(bounded, "30.0"));
  EXPECT_TRUE(fits(sevens, "700000000000000007"));
  EXPECT_FALSE(fits(sevens, "7000000000000000070"));  // of 19 digits
  EXPECT_TRUE(fits_schema(R"({"multipleOf": 1000, "minimum": 0, "maximum": 9999})", "9000"));
  EXPECT_THAT(refusal_of(R"({"type": "integer", "multipleOf": 501})"),
              testing::HasSubstr("multipleOf at # is not supported above 500"));
  EXPECT_THAT(refusal_of(R"({"multipleOf": -1})"), testing::HasSubstr("no number above 0"));
}

TEST(JsonSchema, KeepsNumbersOf64BitsAndNamesLargerOnes) {
  EXPECT_TRUE(fits_schema(R"({"const": 18446744073709551615})", "18446744073709551615"));
  EXPECT_TRUE(
      fits_schema(R"({"type": "integer", "maximum": 9223372036854775807})", "9223372036854775807"));
  EXPECT_FALSE(
      fits_schema(R"({"type": "integer", "maximum": 9223372036854775807})", "9223372036854775808"));
  EXPECT_FALSE(fits_schema(R"({"type": "number", "maximum": 999999999999999999})",
                           "999999999999999998.9"));  // rounded, it is more
  for (const char* schema :
       {R"({"const": 18446744073709551616})", R"({"enum": [1, [-9223372036854775809]]})"})
    EXPECT_THAT(refusal_of(schema), testing::HasSubstr("at # has a number beyond 64 bits"));
  EXPECT_THAT(refusal_of(R"({"minimum": 18446744073709551616})"),
              testing::HasSubstr("minimum at # is beyond 64 bits"));
}

TEST(JsonSchema, TakesEachConstantOnceWhereItemsAreUnique) {
  constexpr auto kSchema =
      R"({"$defs": {"x": {"enum": ["a", 1, 1.0, null]}}, "items": {"$ref": "#/$defs/x"}, "uniqueItems": true, "minItems": 1, "maxItems": 3})";
  EXPECT_TRUE(fits_schema(kSchema, R"([null, "a", 1])"));
  EXPECT_TRUE(fits_schema(kSchema, R"([ 1 ])"));
  EXPECT_FALSE(fits_schema(kSchema, "[]"));
  EXPECT_FALSE(fits_schema(kSchema, "[1, 1]"));
  EXPECT_FALSE(fits_schema(kSchema, "[1, null, 1]"));
  EXPECT_TRUE(
      fits_schema(R"({"items": {"type": "boolean"}, "uniqueItems": true})", "[false, true]"));
  EXPECT_FALSE(
      fits_schema(R"({"items": {"type": "boolean"}, "uniqueItems": true})", "[true, true]"));
  EXPECT_TRUE(fits_schema(R"({"maxItems": 1, "uniqueItems": true})", R"(["x"])"));
  for (const char* schema :
       {R"({"items": {"type": "string"}, "uniqueItems": true})", R"({"uniqueItems": true})",
        R"({"items": {"enum": [1, 2, 3, 4, 5, 6, 7, 8, 9]}, "uniqueItems": true})",
        R"({"prefixItems": [{"const": 1}], "items": {"const": 1}, "uniqueItems": true})"})
    EXPECT_THAT(refusal_of(schema), testing::HasSubstr("uniqueItems at # is not supported"));
}

// Objects of some of the properties a, b and c, in this order.
TEST(JsonSchema, CountsMembersThatMayBeAbsent) {
  const auto text_of = [](int set) {
    std::string text;
    for (int i = 0; i < 4; ++i)
      if ((set >> i & 1) != 0)
        text += fmt::format("{}\"{}\": 1", text.empty() ? "" : ", ", "abcx"[i]);
    return "{" + text + "}";
  };
  for (const bool others : {false, true}) {
    for (int min = 0; min <= 4; ++min) {
      for (int max = std::max(min, 1); max <= 4; ++max) {
        auto schema = ordered_json::parse(
            R"({"properties": {"a": {"const": 1}, "b": {"const": 1}, "c": {"const": 1}}, "required": ["b"]})");
        schema["additionalProperties"] = others;
        schema["minProperties"] = min;
        if (max < 4) schema["maxProperties"] = max;
        if (!others && min > 3) continue;
        Automaton automaton(make_program(rules_of_schema(schema.dump())));
        for (int set = 0; set < 16; ++set) {
          const int size = std::popcount(static_cast<unsigned>(set));
          const bool is_valid = size >= min && size <= max && (set & 2) != 0 && (others || set < 8);
          EXPECT_EQ(fits(automaton, text_of(set)), is_valid) << schema << text_of(set);
        }
        EXPECT_FALSE(fits(automaton, R"({"b": 1, "x": 1, "x": 1, "x": 1})") && min > 2);
      }
    }
  }
  EXPECT_THAT(refusal_of(R"({"type": "object", "minProperties": 2})"),
              testing::HasSubstr("minProperties at # is not supported beyond"));
}

TEST(JsonSchema, HoldsTheNamesOfMembers) {
  constexpr auto kPattern =
      R"({"patternProperties": {"^x-[0-9]$": {"type": "integer"}}, "additionalProperties": false, "maxProperties": 2})";
  EXPECT_TRUE(fits_schema(kPattern, R"({"x-1": 5, "x-2": 6})"));
  EXPECT_FALSE(fits_schema(kPattern, R"({"x-1": "5"})"));
  EXPECT_FALSE(fits_schema(kPattern, R"({"y": 5})"));
  EXPECT_FALSE(fits_schema(kPattern, R"({"x-1": 5, "x-2": 6, "x-3": 7})"));
  constexpr auto kNames =
      R"({"propertyNames": {"enum": ["a", "b", 3]}, "additionalProperties": {"const": 1}, "minProperties": 1})";
  EXPECT_TRUE(fits_schema(kNames, R"({"b": 1, "a": 1})"));
  EXPECT_FALSE(fits_schema(kNames, R"({"c": 1})"));
  EXPECT_FALSE(fits_schema(kNames, "{}"));
  EXPECT_TRUE(fits_schema(R"({"propertyNames": {"maxLength": 2}})", R"({"ab": [1]})"));
  EXPECT_FALSE(fits_schema(R"({"propertyNames": {"maxLength": 2}})", R"({"abc": [1]})"));
  for (const char* schema :
       {R"({"patternProperties": {"a": {}, "b": {}}})",
        R"({"patternProperties": {"a": {}}, "properties": {"a": {}}})",
        R"({"patternProperties": {"a": {}}, "additionalProperties": true})",
        R"({"allOf": [{"patternProperties": {"a": {}}}, {"additionalProperties": false}]})"})
    EXPECT_THAT(refusal_of(schema), testing::HasSubstr("patternProperties at #"));
  EXPECT_THAT(refusal_of(R"({"propertyNames": {"minLength": 1}, "required": ["a"]})"),
              testing::HasSubstr("propertyNames at # beside properties or required"));
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

TEST(JsonSchema, AnIntegerIsANumberWhereSchemasHoldTogether) {
  for (
      const char* schema :
      {R"({"type": ["number", "null"], "anyOf": [{"type": "integer", "maximum": 5}, {"type": "null"}]})",
       R"({"type": ["null", "integer"], "allOf": [{"type": ["number", "null", "string"], "maximum": 5}]})"}) {
    for (const char* text : {"5", "-2", "null"}) EXPECT_TRUE(fits_schema(schema, text)) << text;
    for (const char* text : {"6", "1.5", R"("x")"}) EXPECT_FALSE(fits_schema(schema, text)) << text;
  }
  EXPECT_TRUE(fits_schema(
      R"({"allOf": [{"type": "number", "minimum": 0}, {"type": ["number", "integer"]}]})", "1.5"));
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

TEST(JsonSchema, AFormatHasTheLengthsThatItHasAnyway) {
  const std::string url =
      R"({"type": "string", "format": "uri", "minLength": 1, "maxLength": 2083})";
  EXPECT_TRUE(fits_schema(url, R"("https://a.b/c")"));
  EXPECT_FALSE(fits_schema(url, R"("a")"));
  EXPECT_THAT(refusal_of(R"({"type": "string", "format": "uri", "maxLength": 20})"),
              testing::HasSubstr("maxLength at # beside a pattern or format is not supported"));
  EXPECT_THAT(refusal_of(R"({"type": "string", "format": "date", "minLength": 11})"),
              testing::HasSubstr("minLength at # beside a pattern or format is not supported"));
}

TEST(JsonSchema, AnAddressOfMailHasTheLengthsOfRfc5321) {
  constexpr auto kSchema = R"({"type": "string", "format": "email", "maxLength": 254})";
  const auto quoted = [](const std::string& local) { return "\"" + local + "@example.com\""; };
  const std::string part(20, 'a');
  EXPECT_TRUE(fits_schema(kSchema, quoted(std::string(64, 'a'))));
  EXPECT_TRUE(fits_schema(kSchema, quoted(part + "." + part + "." + part)));
  EXPECT_FALSE(fits_schema(kSchema, quoted(std::string(65, 'a'))));
  EXPECT_FALSE(fits_schema(kSchema, quoted(part + "." + part + "." + part + "." + part)));
}

TEST(JsonSchema, AFormatThatItDoesNotAssertIsAnAnnotation) {
  for (const char* format : {"password", "binary", "path", "my-own"}) {
    const auto schema =
        fmt::format(R"({{"type": "string", "format": "{}", "maxLength": 2}})", format);
    EXPECT_TRUE(fits_schema(schema, R"("ab")")) << format;
    EXPECT_FALSE(fits_schema(schema, R"("abc")")) << format;
  }
  EXPECT_THAT(refusal_of(R"({"type": "string", "format": "json-pointer"})"),
              testing::HasSubstr("format at # json-pointer is not supported"));
}

}  // namespace grammar_test
}  // namespace ferry::rollout::grammar
