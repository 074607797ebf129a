// Operators, members, methods, filters, tests and functions of templates, each with the result that
// Python or jinja2 has. tests/data/chat_templates holds more of them, recorded from jinja2.
#include "rollout/text/jinja/library.h"

#include <gtest/gtest.h>

#include "rollout/text/jinja/evaluator.h"
#include "tests/support/expect.h"

namespace ferry::rollout::text::jinja {
namespace library_test {

using support::fails;

std::string say(const std::string& expression) {
  return render(*parse_template("{{ " + expression + " }}"), {});
}

::testing::AssertionResult refuses(const std::string& expression, std::string_view message) {
  return fails(ErrorKind::kUsage, {message}, [&] { say(expression); });
}

struct Case {
  const char* name;
  const char* expression;
  const char* text;
};
class Library : public ::testing::TestWithParam<Case> {};

TEST_P(Library, SaysWhatPythonSays) {
  EXPECT_EQ(say(GetParam().expression), GetParam().text);
}

std::string name_of(const ::testing::TestParamInfo<Case>& info) {
  return info.param.name;
}

INSTANTIATE_TEST_SUITE_P(Operators,
                         Library,
                         ::testing::Values(Case{"FloorDivisionRoundsDown", "-7 // 2", "-4"},
                                           Case{"TheRemainderHasTheSignOfTheDivisor", "-7 % 3",
                                                "2"},
                                           Case{"DivisionIsReal", "4 / 2", "2.0"},
                                           Case{"ANegativePowerIsReal", "2 ** -1", "0.5"},
                                           Case{"BooleansAreNumbers", "true + 1", "2"},
                                           Case{"TextIsRepeated", "'ab' * 2", "abab"},
                                           Case{"ListsAreJoined", "[1] + ['a']", "[1, 'a']"},
                                           Case{"TildeJoinsAnything", "1 ~ 'a' ~ none", "1aNone"},
                                           Case{"InLooksIntoText", "'b' in 'abc'", "True"},
                                           Case{"InLooksAtKeys", "'a' in {'a': 1}", "True"},
                                           Case{"EqualNumbersOfOtherTypes", "1 == 1.0", "True"},
                                           Case{"ATupleIsNoList", "(1,) == [1]", "False"}),
                         name_of);

INSTANTIATE_TEST_SUITE_P(
    Items,
    Library,
    ::testing::Values(Case{"AnIndexMayCountFromTheEnd", "[1, 2][-1]", "2"},
                      Case{"AnItemBeyondTheEndIsUndefined", "[1][5] is defined", "False"},
                      Case{"TextHasCharacters", "'a\u00E9'[1]", "\u00E9"},
                      Case{"ASliceIsCutAtTheEnds", "[1, 2, 3][1:9]", "[2, 3]"},
                      Case{"ASliceMayGoBackwards", "'abc'[::-1]", "cba"},
                      Case{"AMemberMayBeAKey", "{'a': 1}.a", "1"},
                      Case{"AMethodHidesAKeyAsAMember", "{'get': 1}['get']", "1"}),
    name_of);

INSTANTIATE_TEST_SUITE_P(
    Methods,
    Library,
    ::testing::Values(Case{"SplitAtWhiteSpaceDropsEmptyParts", "' a  b '.split()", "['a', 'b']"},
                      Case{"SplitAtTextKeepsEmptyParts", "'a,,b'.split(',')", "['a', '', 'b']"},
                      Case{"SplitStopsAfterItsCount", "'a b c'.split(none, 1)", "['a', 'b c']"},
                      Case{"RsplitCountsFromTheRight", "'a b c'.rsplit(none, 1)", "['a b', 'c']"},
                      Case{"SplitKnowsSeparatorsOfAscii", "'a\\x1cb'.split()", "['a', 'b']"},
                      Case{"SplitlinesKnowsAllLineEnds", "'a\\r\\nb\\x0bc'.splitlines()",
                           "['a', 'b', 'c']"},
                      Case{"StripTakesCharacters", "'xyax'.strip('xy')", "a"},
                      Case{"LstripTakesTheLeft", "' a '.lstrip() ~ '|'", "a |"},
                      Case{"ReplaceStopsAfterItsCount", "'aaa'.replace('a', 'b', 2)", "bba"},
                      Case{"ReplaceOfNothingIsBetweenAll", "'ab'.replace('', '-')", "-a-b-"},
                      Case{"FindCountsCharacters", "'\u00E9a'.find('a')", "1"},
                      Case{"FindSaysMinusOne", "'a'.find('b')", "-1"},
                      Case{"StartswithTakesATuple", "'ab'.startswith(('x', 'a'))", "True"},
                      Case{"TitleBeginsWordsAtEveryNonLetter", "\"it's\".title()", "It'S"},
                      Case{"IsdigitOfNothing", "''.isdigit()", "False"},
                      Case{"GetHasADefault", "{}.get('a', 2)", "2"},
                      Case{"ItemsAreTuples", "{'a': 1}.items() | list", "[('a', 1)]"},
                      Case{"IndexFindsAnItem", "[4, 5].index(5)", "1"}),
    name_of);

INSTANTIATE_TEST_SUITE_P(
    Filters,
    Library,
    ::testing::Values(
        Case{"Default", "x | default('a')", "a"},
        Case{"DefaultOfFalse", "'' | default('a', true)", "a"},
        Case{"JoinByAttribute", "[{'a': 1}, {'a': 2}] | join('-', 'a')", "1-2"},
        Case{"MapToAttribute", "[{'a': {'b': 1}}] | map(attribute='a.b') | list", "[1]"},
        Case{"MapByFilter", "['a'] | map('upper') | list", "['A']"},
        Case{"SelectByTest", "[1, 2, 3] | select('odd') | list", "[1, 3]"},
        Case{"RejectattrByTest", "[{'a': 1}, {'a': 2}] | rejectattr('a', 'eq', 1) | list",
             "[{'a': 2}]"},
        Case{"SortIgnoresCase", "['b', 'A', 'a'] | sort", "['A', 'a', 'b']"},
        Case{"SortIsStableInReverse", "['a', 'A'] | sort(reverse=true)", "['a', 'A']"},
        Case{"DictsortByValue", "{'a': 2, 'b': 1} | dictsort(by='value')", "[('b', 1), ('a', 2)]"},
        Case{"UniqueIgnoresCase", "['a', 'A', 'b'] | unique | list", "['a', 'b']"},
        Case{"IndentLeavesTheFirstLine", "'a\\nb' | indent(2)", "a\n  b"},
        Case{"IntOfText", "' 12 ' | int + 1", "13"},
        Case{"IntOfNoNumber", "'x' | int(7)", "7"},
        Case{"RoundIsToTheNearestEven", "2.5 | round", "2.0"},
        Case{"RoundToDigits", "1.256 | round(2)", "1.26"},
        Case{"EscapeIsForHtml", "'<&\"' | escape", "&lt;&amp;&#34;"},
        Case{"TitleBeginsWordsAtWhiteSpace", "\"it's me\" | title", "It's Me"},
        Case{"ReverseOfText", "'a\u00E9' | reverse", "\u00E9a"},
        Case{"SumByAttribute", "[{'a': 1}, {'a': 2}] | sum('a')", "3"},
        Case{"FirstOfNothingIsUndefined", "[] | first is defined", "False"},
        Case{"MaxIgnoresCase", "['a', 'B'] | max", "B"},
        Case{"Tojson", "{'a': [1, true, none, '\u00E9\"']} | tojson",
             "{\"a\": [1, true, null, \"\u00E9\\\"\"]}"},
        Case{"TojsonIndented", "[1] | tojson(indent=2)", "[\n  1\n]"},
        Case{"TojsonOfNothingIndented", "[] | tojson(indent=2)", "[]"}),
    name_of);

INSTANTIATE_TEST_SUITE_P(Tests,
                         Library,
                         ::testing::Values(Case{"ABooleanIsNoInteger", "true is integer", "False"},
                                           Case{"ABooleanIsANumber", "true is number", "True"},
                                           Case{"TextIsASequence", "'a' is sequence", "True"},
                                           Case{"NoneIsDefined", "none is defined", "True"},
                                           Case{"DivisibleBy", "9 is divisibleby(3)", "True"},
                                           Case{"InAList", "1 is in [1, 2]", "True"},
                                           Case{"UpperNeedsLetters", "'1' is upper", "False"}),
                         name_of);

INSTANTIATE_TEST_SUITE_P(Functions,
                         Library,
                         ::testing::Values(Case{"RangeMayGoDown", "range(3, 0, -2) | list",
                                                "[3, 1]"},
                                           Case{"DictTakesNames", "dict(a=1)", "{'a': 1}"}),
                         name_of);

TEST(LibraryErrors, AnIntegerThatOverflowsIsTooLarge) {
  EXPECT_TRUE(refuses("9223372036854775807 + 1", "a number is too large"));
}

TEST(LibraryErrors, DivisionByZeroIsNamed) {
  EXPECT_TRUE(refuses("1 // 0", "integer division or modulo by zero"));
}

TEST(LibraryErrors, OperandsWithoutASumAreNamed) {
  EXPECT_TRUE(refuses("'a' + 1", "unsupported operand type(s) for +: 'str' and 'int'"));
}

TEST(LibraryErrors, TypesWithoutAnOrderAreNamed) {
  EXPECT_TRUE(refuses("1 < 'a'", "'int' and 'str' have no order"));
}

TEST(LibraryErrors, AMethodThatChangesAListIsRefused) {
  EXPECT_TRUE(refuses("[].append(1)", "append would change a list"));
}

TEST(LibraryErrors, AMethodThatChangesADictionaryIsRefused) {
  EXPECT_TRUE(refuses("{}.update({})", "update would change a dictionary"));
}

TEST(LibraryErrors, AMethodThatPythonHasIsNamed) {
  EXPECT_TRUE(refuses("'a'.zfill(3)", "the method zfill of a string is not supported"));
}

TEST(LibraryErrors, AMissingArgumentIsNamed) {
  EXPECT_TRUE(refuses("'a'.find()", "find lacks its argument sub"));
}

TEST(LibraryErrors, ALongRangeIsRefused) {
  EXPECT_TRUE(refuses("range(100001)", "a range of more than 100000 numbers"));
}

TEST(LibraryErrors, TheTemplatesOwnErrorIsItsMessage) {
  EXPECT_TRUE(refuses("raise_exception('no system role')", "no system role"));
}

}  // namespace library_test
}  // namespace ferry::rollout::text::jinja
