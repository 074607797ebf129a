#include "rollout/text/unicode/unicode.h"

#include <gtest/gtest.h>

namespace ferry::rollout::text {
namespace unicode_test {

TEST(Utf8, WritesEachLengthOfCharacter) {
  std::string text;
  for (const char32_t c : {U'$', U'\u00A3', U'\u20AC', U'\U0001F600'}) append_utf8(c, text);
  EXPECT_EQ(text, "$\xC2\xA3\xE2\x82\xAC\xF0\x9F\x98\x80");
}

TEST(Utf8, ReadsBackTheCharactersThatItWrites) {
  const std::u32string characters = U"\u007F\u0080\u07FF\u0800\uFFFF\U00010000\U0010FFFF";
  std::string text;
  for (const auto c : characters) append_utf8(c, text);
  EXPECT_EQ(to_code_points(text), characters);
}

TEST(Utf8, FindsTheCharacterBeforeAPlace) {
  const std::string text = "a\xE2\x82\xAC!";
  EXPECT_EQ(previous_boundary(text, 5), 4);
  EXPECT_EQ(previous_boundary(text, 4), 1);
  EXPECT_EQ(previous_boundary(text, 1), 0);
}

TEST(Utf8, ASurrogateIsNotValid) {
  EXPECT_FALSE(is_valid_utf8("\xED\xA0\x80"));
}

TEST(Utf8, ALongSpellingIsNotValid) {
  EXPECT_FALSE(is_valid_utf8("\xC0\x80"));
  EXPECT_FALSE(is_valid_utf8("\xE0\x80\x80"));
}

TEST(Utf8, ACharacterBeyondTheLastIsNotValid) {
  EXPECT_TRUE(is_valid_utf8("\xF4\x8F\xBF\xBF"));
  EXPECT_FALSE(is_valid_utf8("\xF4\x90\x80\x80"));
}

TEST(Utf8, FindsABrokenByteBehindALongStretchOfAscii) {
  EXPECT_FALSE(is_valid_utf8(std::string(37, 'a') + "\xFF"));
}

TEST(Utf8, TheHeadOfABrokenOffCharacterMayGoOn) {
  const auto head = utf8_head("\xF0\x9F\x98");
  EXPECT_FALSE(head.valid);
  EXPECT_FALSE(head.complete);
  EXPECT_EQ(head.length, 3);
}

TEST(Utf8, ReplacesEachBrokenOffCharacterOnce) {
  EXPECT_EQ(replace_invalid_utf8("a\xE2\x82z\x80\x80"), "a\uFFFDz\uFFFD\uFFFD");
}

TEST(CodePointSet, HoldsTheEndsOfItsRanges) {
  const CodePointSet set({{0x41, 0x43}, {0x1F600, 0x1F602}});
  EXPECT_TRUE(set.contains(0x41) && set.contains(0x43) && set.contains(0x1F602));
  EXPECT_FALSE(set.contains(0x40) || set.contains(0x44) || set.contains(0x1F603));
}

TEST(CodePointSet, JoinsRangesThatTouch) {
  const CodePointSet set({{5, 9}, {1, 4}, {7, 12}});
  ASSERT_EQ(set.ranges().size(), 1);
  EXPECT_EQ(set.ranges()[0].first, 1);
  EXPECT_EQ(set.ranges()[0].last, 12);
}

TEST(CodePointSet, TheInverseHoldsEverythingElse) {
  const auto inverse = CodePointSet({{0, 9}, {20, kLastCodePoint}}).inverted();
  ASSERT_EQ(inverse.ranges().size(), 1);
  EXPECT_EQ(inverse.ranges()[0].first, 10);
  EXPECT_EQ(inverse.ranges()[0].last, 19);
}

TEST(CodePointSet, AnIntersectionHoldsWhatBothHold) {
  const auto both = CodePointSet({{1, 10}}).intersected(CodePointSet({{5, 20}}));
  ASSERT_EQ(both.ranges().size(), 1);
  EXPECT_EQ(both.ranges()[0].first, 5);
  EXPECT_EQ(both.ranges()[0].last, 10);
}

TEST(CodePointSet, KnowsCategoriesAndTheirGroups) {
  EXPECT_TRUE(CodePointSet::named("Lu")->contains(U'\u00C4'));
  EXPECT_FALSE(CodePointSet::named("Lu")->contains(U'\u00E4'));
  EXPECT_TRUE(CodePointSet::named("L")->contains(U'\u00E4'));
}

TEST(CodePointSet, KnowsScripts) {
  EXPECT_TRUE(CodePointSet::named("Han")->contains(U'\u4E00'));
  EXPECT_FALSE(CodePointSet::named("Han")->contains(U'\u3042'));
}

TEST(CodePointSet, WordIsLettersMarksAndDigitsWithDifferences) {
  const auto& word = *CodePointSet::named("Word");
  EXPECT_TRUE(word.contains(U'a') && word.contains(U'_') && word.contains(U'\u0301'));
  EXPECT_TRUE(word.contains(U'\u24B6'));  // a symbol that Oniguruma counts among the letters
  EXPECT_FALSE(word.contains(U'-'));
}

TEST(CodePointSet, ALetterOfUnicode16IsALetter) {
  EXPECT_TRUE(CodePointSet::named("Lu")->contains(0xA7CB));
}

TEST(CodePointSet, EndsWherePagesAndWordsDo) {
  const CodePointSet set({{0x3F, 0x40}, {0xC0, 0x1FF}, {0x300, 0x300}, {0x10FF00, kLastCodePoint}});
  for (const char32_t c : {0x3F, 0x40, 0xC0, 0x100, 0x1FF, 0x300, 0x10FF00, 0x10FFFF})
    EXPECT_TRUE(set.contains(c)) << std::size_t{c};
  for (const char32_t c : {0x3E, 0x41, 0xBF, 0x200, 0x2FF, 0x301, 0x10FEFF})
    EXPECT_FALSE(set.contains(c)) << std::size_t{c};
}

TEST(CodePointSet, HasNothingBeyondUnicode) {
  EXPECT_FALSE(CodePointSet().contains(0));
  EXPECT_FALSE(CodePointSet().inverted().contains(kLastCodePoint + 1));
  EXPECT_FALSE(CodePointSet().inverted().contains(0x1FFFFF));  // four bytes that are not UTF-8
}

TEST(CodePointSet, AnUnknownNameHasNoSet) {
  EXPECT_EQ(CodePointSet::named("Klingon"), nullptr);
}

TEST(WhiteSpace, IsCountedAtBothEnds) {
  const std::string text = " \u3000\tx y\u00A0\n";
  EXPECT_EQ(white_space_prefix(text), 5);
  EXPECT_EQ(white_space_suffix(text), 3);
}

TEST(WhiteSpace, MayBeTheWholeText) {
  EXPECT_EQ(white_space_prefix(" \n "), 3);
  EXPECT_EQ(white_space_suffix(" \n "), 3);
}

}  // namespace unicode_test
}  // namespace ferry::rollout::text
