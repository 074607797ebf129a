#include "rollout/text/jinja/lexer.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/support/expect.h"

namespace ferry::rollout::text::jinja {
namespace lexer_test {

using support::fails;

// The tokens' texts between bars, "\n" as "/".
std::string tokens_of(std::string_view source) {
  std::string found;
  for (const auto& token : tokenize(source)) {
    if (token.kind != Token::Kind::kEnd) found += "|" + token.text;
  }
  std::ranges::replace(found, '\n', '/');
  return found;
}

TEST(Lexer, TextBetweenTagsIsOneToken) {
  EXPECT_EQ(tokens_of("a {{ b }} c"), "|a |{{|b|}}| c");
}

TEST(Lexer, ABraceAloneIsText) {
  EXPECT_EQ(tokens_of("{a} {"), "|{a} {");
}

TEST(Lexer, ABlockTagTakesTheLineBreakBehindIt) {
  EXPECT_EQ(tokens_of("{% if x %}\na"), "|{%|if|x|%}|a");
}

TEST(Lexer, AVariableTagKeepsTheLineBreakBehindIt) {
  EXPECT_EQ(tokens_of("{{ x }}\na"), "|{{|x|}}|/a");
}

TEST(Lexer, ABlockTagTakesTheIndentationBeforeIt) {
  EXPECT_EQ(tokens_of("a\n  {% x %}"), "|a/|{%|x|%}");
}

TEST(Lexer, TheIndentationBehindTextStays) {
  EXPECT_EQ(tokens_of("a  {% x %}"), "|a  |{%|x|%}");
}

TEST(Lexer, AMinusTakesAllWhiteSpaceOnItsSide) {
  EXPECT_EQ(tokens_of("a \n {{- x -}} \n b"), "|a|{{|x|}}|b");
}

TEST(Lexer, APlusKeepsWhiteSpace) {
  EXPECT_EQ(tokens_of("a\n  {%+ x +%}\nb"), "|a/  |{%|x|%}|/b");
}

TEST(Lexer, ACommentLeavesNothing) {
  EXPECT_EQ(tokens_of("a{# {{ b }} #}c"), "|a|c");
}

TEST(Lexer, ARawBlockIsText) {
  EXPECT_EQ(tokens_of("{% raw %}{{ x }}{% endraw %}"), "|{{ x }}");
}

TEST(Lexer, TheLongestOperatorIsTaken) {
  EXPECT_EQ(tokens_of("{{ a**b//c<=d }}"), "|{{|a|**|b|//|c|<=|d|}}");
}

TEST(Lexer, BracesOfADictionaryDoNotEndTheTag) {
  EXPECT_EQ(tokens_of("{{ {'a': {}} }}"), "|{{|{|a|:|{|}|}|}}");
}

TEST(Lexer, StringsHavePythonsEscapes) {
  EXPECT_EQ(tokens_of(R"({{ '\x41\u00e9\t\q' }})"), "|{{|A\u00E9\t\\q|}}");
}

TEST(Lexer, NumbersMayHaveUnderscoresAndExponents) {
  const auto tokens = tokenize("{{ 1_000 2.5e-3 }}");
  EXPECT_EQ(tokens[1].kind, Token::Kind::kInteger);
  EXPECT_EQ(tokens[1].text, "1000");
  EXPECT_EQ(tokens[2].kind, Token::Kind::kFloat);
  EXPECT_EQ(tokens[2].text, "2.5e-3");
}

TEST(Lexer, ATokenKnowsItsLine) {
  EXPECT_EQ(tokenize("a\nb\n{{ x }}")[2].line, 3);
}

TEST(Lexer, WindowsLineEndsCountOnce) {
  EXPECT_EQ(tokenize("a\r\nb\r\n{{ x }}")[2].line, 3);
}

TEST(Lexer, ATagWithoutItsEndIsNamed) {
  EXPECT_TRUE(
      fails(ErrorKind::kUsage, {"line 2: a tag without its }}"}, [] { tokenize("a\n{{ x"); }));
}

TEST(Lexer, ABracketThatWasNotOpenedIsNamed) {
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"unexpected ')'"}, [] { tokenize("{{ x) }}"); }));
}

TEST(Lexer, AStringWithoutItsEndIsNamed) {
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"a string without its end"}, [] { tokenize("{{ 'x }}"); }));
}

TEST(Lexer, AnEscapedSurrogateIsNoCharacter) {
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"an escape that is no character"},
                    [] { tokenize(R"({{ '\ud800' }})"); }));
}

}  // namespace lexer_test
}  // namespace ferry::rollout::text::jinja
