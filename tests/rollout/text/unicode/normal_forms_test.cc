#include <gtest/gtest.h>

#include "rollout/text/unicode/unicode.h"

namespace ferry::rollout::text {
namespace normal_forms_test {

TEST(NormalForms, NfdTakesACharacterApartAllTheWay) {
  EXPECT_EQ(normalize("\u1E09", NormalForm::kNfd), "c\u0327\u0301");
}

TEST(NormalForms, NfcJoinsMarksToTheirLetter) {
  EXPECT_EQ(normalize("c\u0327\u0301", NormalForm::kNfc), "\u1E09");
}

TEST(NormalForms, MarksAreOrderedByClass) {
  EXPECT_EQ(normalize("a\u0301\u0323", NormalForm::kNfd), "a\u0323\u0301");
}

TEST(NormalForms, MarksOfOneClassKeepTheirOrder) {
  EXPECT_EQ(normalize("a\u0301\u0300", NormalForm::kNfd), "a\u0301\u0300");
}

TEST(NormalForms, AMarkOfTheSameClassBlocksTheNext) {
  EXPECT_EQ(normalize("a\u0305\u0301", NormalForm::kNfc), "a\u0305\u0301");
}

TEST(NormalForms, NfcDoesNotMakeExcludedCharacters) {
  EXPECT_EQ(normalize("\u0958", NormalForm::kNfc), "\u0915\u093C");
}

TEST(NormalForms, ACharacterThatIsAnotherOneBecomesThat) {
  EXPECT_EQ(normalize("\u212B", NormalForm::kNfc), "\u00C5");
  EXPECT_EQ(normalize("\uF900", NormalForm::kNfd), "\u8C48");
}

TEST(NormalForms, SyllablesOfHangulComeApart) {
  EXPECT_EQ(normalize("\uAC01", NormalForm::kNfd), "\u1100\u1161\u11A8");
}

TEST(NormalForms, SyllablesOfHangulAreJoined) {
  EXPECT_EQ(normalize("\u1100\u1161\u11A8", NormalForm::kNfc), "\uAC01");
}

TEST(NormalForms, OnlyTheCompatibleFormsReplaceLigatures) {
  EXPECT_EQ(normalize("\uFB01", NormalForm::kNfc), "\uFB01");
  EXPECT_EQ(normalize("\uFB01", NormalForm::kNfkc), "fi");
}

TEST(NormalForms, TheCompatibleFormOfAMarkedLetterComposes) {
  EXPECT_EQ(normalize("\u1E9B\u0323", NormalForm::kNfkc), "\u1E69");
  EXPECT_EQ(normalize("\u1E9B\u0323", NormalForm::kNfkd), "s\u0323\u0307");
}

TEST(NormalForms, ADecompositionYoungerThanUnicode9IsNotMade) {
  EXPECT_EQ(normalize("\u32FF", NormalForm::kNfkc), "\u32FF");  // the era Reiwa, Unicode 12.1
}

TEST(NormalForms, WhatIsNormalStaysAsItIs) {
  const std::string text = "plain \u00E9 \u4E00";
  EXPECT_EQ(normalize(text, NormalForm::kNfc), text);
}

TEST(Case, LowerCaseLooksAtEachCharacterByItself) {
  EXPECT_EQ(lowercase("\u00C4\u0412\u03A3"), "\u00E4\u0432\u03C3");
}

TEST(Case, LowerCaseMayBeTwoCharacters) {
  EXPECT_EQ(lowercase("\u0130"), "i\u0307");
}

TEST(Case, UpperCaseMayBeTwoCharacters) {
  EXPECT_EQ(uppercase("stra\u00DFe"), "STRASSE");
}

TEST(Case, SeveralLettersMayShareAnUpperCase) {
  EXPECT_EQ(uppercase("s\u017F"), "SS");
  EXPECT_EQ(uppercase("\u03C3\u03C2"), "\u03A3\u03A3");
}

}  // namespace normal_forms_test
}  // namespace ferry::rollout::text
