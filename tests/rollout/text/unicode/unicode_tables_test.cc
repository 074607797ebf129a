#include "rollout/text/unicode/unicode_tables.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace ferry::rollout::text {
namespace unicode_tables_test {

TEST(UnicodeTables, ReadsRangesAndSingleCharacters) {
  const auto ranges = parse_ranges("9-D 20 10FFFF ");
  ASSERT_EQ(ranges.size(), 3);
  EXPECT_EQ(ranges[0].first, 9);
  EXPECT_EQ(ranges[0].last, 0xD);
  EXPECT_EQ(ranges[1].first, 0x20);
  EXPECT_EQ(ranges[1].last, 0x20);
  EXPECT_EQ(ranges[2].last, 0x10FFFF);
}

TEST(UnicodeTables, ReadsAMappingToSeveralCharacters) {
  const auto mappings = parse_mappings("C0=41.300 ");
  ASSERT_EQ(mappings.size(), 1);
  EXPECT_EQ(mappings[0].from, U'\u00C0');
  EXPECT_EQ(mappings[0].to, U"A\u0300");
  EXPECT_TRUE(mappings[0].composes);
}

TEST(UnicodeTables, AMappingWithAMarkIsNotUndone) {
  EXPECT_FALSE(parse_mappings("958=915.93C! ")[0].composes);
}

TEST(UnicodeTables, AMappingToOneCharacterIsNotUndone) {
  EXPECT_FALSE(parse_mappings("F900=8C48 ")[0].composes);
}

TEST(UnicodeTables, ARunMapsToARun) {
  const auto mappings = parse_mappings("41-43=61 ");
  ASSERT_EQ(mappings.size(), 3);
  EXPECT_EQ(mappings[2].from, U'C');
  EXPECT_EQ(mappings[2].to, U"c");
}

TEST(UnicodeTables, ARunMayTakeEverySecondCharacter) {
  const auto mappings = parse_mappings("100-104/2=101 ");
  ASSERT_EQ(mappings.size(), 3);
  EXPECT_EQ(mappings[1].from, 0x102);
  EXPECT_EQ(mappings[1].to, U"\u0103");
}

TEST(UnicodeTables, AMappingWithoutItsCharacterFollowsTheLast) {
  const auto mappings = parse_mappings("41-42=61 =FF ");
  ASSERT_EQ(mappings.size(), 3);
  EXPECT_EQ(mappings[2].from, U'C');
}

TEST(UnicodeTables, MappingsAscend) {
  for (const auto text : {unicode_data::table("Canonical"), unicode_data::table("Compatibility"),
                          unicode_data::table("Lowercase")}) {
    EXPECT_TRUE(std::ranges::is_sorted(parse_mappings(text), {}, &CharacterMapping::from));
  }
}

TEST(UnicodeTables, CategoriesDoNotOverlap) {
  std::vector<CodePointRange> all;
  for (const auto& category : category_ranges()) {
    all.insert(all.end(), category.ranges.begin(), category.ranges.end());
  }
  std::ranges::sort(all, {}, &CodePointRange::first);
  for (std::size_t i = 1; i < all.size(); ++i) EXPECT_LT(all[i - 1].last, all[i].first);
}

TEST(UnicodeTables, TheLastCharactersArePrivate) {
  const auto categories = category_ranges();
  const auto found = std::ranges::find(categories, "Co", &NamedRanges::name);
  ASSERT_NE(found, categories.end());
  EXPECT_EQ(found->ranges.back().last, 0x10FFFD);
}

TEST(UnicodeTables, CombiningClassesAreThoseOfTheirRange) {
  const auto ranges = combining_ranges();
  const auto cedilla = std::ranges::find_if(
      ranges, [](const auto& one) { return one.range.first <= 0x327 && 0x327 <= one.range.last; });
  ASSERT_NE(cedilla, ranges.end());
  EXPECT_EQ(cedilla->combining_class, 202);
}

}  // namespace unicode_tables_test
}  // namespace ferry::rollout::text
