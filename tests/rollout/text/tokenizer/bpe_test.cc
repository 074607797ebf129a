#include "rollout/text/tokenizer/bpe.h"

#include <gtest/gtest.h>

#include "tests/rollout/text/tokenizer/tiny_tokenizers.h"
#include "tests/support/expect.h"

namespace ferry::rollout::text {
namespace bpe_test {

using nlohmann::ordered_json;
using support::fails;
using Ids = std::vector<TokenId>;

Ids ids_of(const ordered_json& json, std::string_view word, bool byte_level = false) {
  auto file = parse_tokenizer_file(json.dump(), "t.json");
  const Bpe bpe(file, byte_level);
  Bpe::Scratch scratch;
  Ids ids, again;
  bpe.encode(word, scratch, ids);
  bpe.encode(word, scratch, again);
  EXPECT_EQ(again, ids) << "from the cache";
  return ids;
}

// Tokens of characters: a, b, c, ab, bc, abc, <unk>.
ordered_json letters(const std::vector<std::string>& merges) {
  return character_tokenizer({"a", "b", "c", "ab", "bc", "abc", "<unk>"}, merges);
}

TEST(Bpe, TheMergeOfTheLowestRankGoesFirst) {
  EXPECT_EQ(ids_of(letters({"b c", "a b"}), "abc"), (Ids{0, 4}));
}

TEST(Bpe, OfEqualMergesTheLeftmostGoesFirst) {
  EXPECT_EQ(ids_of(character_tokenizer({"a", "aa"}, {"a a"}), "aaa"), (Ids{1, 0}));
}

TEST(Bpe, MergesBuildOnMerges) {
  EXPECT_EQ(ids_of(letters({"a b", "ab c"}), "abcab"), (Ids{5, 3}));
}

TEST(Bpe, ALongWordIsMergedLikeAShortOne) {
  std::string word;
  for (int i = 0; i < 100; ++i) word += "abc";
  EXPECT_EQ(ids_of(letters({"a b", "ab c"}), word), Ids(100, 5));
}

TEST(Bpe, ALongWordIsMergedFromTheLeft) {
  EXPECT_EQ(ids_of(character_tokenizer({"a", "aa"}, {"a a"}), std::string(101, 'a')).back(), 0);
}

TEST(Bpe, UnknownCharactersAreDroppedWithoutAnUnknownToken) {
  EXPECT_EQ(ids_of(letters({}), "axb"), (Ids{0, 1}));
}

TEST(Bpe, EachUnknownCharacterIsAToken) {
  auto json = letters({});
  json["model"]["unk_token"] = "<unk>";
  EXPECT_EQ(ids_of(json, "axyb"), (Ids{0, 6, 6, 1}));
}

TEST(Bpe, UnknownCharactersMayBeFused) {
  auto json = letters({});
  json["model"]["unk_token"] = "<unk>";
  json["model"]["fuse_unk"] = true;
  EXPECT_EQ(ids_of(json, "axyb"), (Ids{0, 6, 1}));
}

TEST(Bpe, UnknownCharactersMayBecomeBytes) {
  auto json = character_tokenizer({"a", "<0xC3>", "<0xA9>"}, {});
  json["model"]["byte_fallback"] = true;
  EXPECT_EQ(ids_of(json, "a\u00E9"), (Ids{0, 1, 2}));
}

TEST(Bpe, AMissingByteMakesTheCharacterUnknown) {
  auto json = character_tokenizer({"a", "<0xC3>", "<unk>"}, {});
  json["model"]["byte_fallback"] = true;
  json["model"]["unk_token"] = "<unk>";
  EXPECT_EQ(ids_of(json, "a\u00E9"), (Ids{0, 2}));
}

TEST(Bpe, AByteLevelModelMergesBytes) {
  EXPECT_EQ(ids_of(byte_level_tokenizer(), "abcab", true), (Ids{257, 256}));
}

TEST(Bpe, AWholeWordMaySkipTheMerges) {
  auto json = letters({});
  EXPECT_EQ(ids_of(json, "abc"), (Ids{0, 1, 2}));
  json["model"]["ignore_merges"] = true;
  EXPECT_EQ(ids_of(json, "abc"), Ids{5});
}

TEST(Bpe, PrintableAsciiStandsForItself) {
  EXPECT_EQ(character_of_byte('a'), U'a');
  EXPECT_EQ(byte_of_character(U'a'), 'a');
}

TEST(Bpe, ASpaceHasACharacterOfItsOwn) {
  EXPECT_EQ(character_of_byte(' '), U'\u0120');
  EXPECT_EQ(byte_of_character(U'\u0120'), ' ');
}

TEST(Bpe, ACharacterThatStandsForNoByteHasNone) {
  EXPECT_EQ(byte_of_character(U' '), -1);
  EXPECT_EQ(byte_of_character(U'\u4E00'), -1);
}

TEST(Bpe, ATokenOfOtherCharactersHasNoBytes) {
  std::string bytes;
  EXPECT_TRUE(bytes_of_token("\u0120a", bytes));
  EXPECT_EQ(bytes, " a");
  EXPECT_FALSE(bytes_of_token("\u4E00", bytes));
}

TEST(Bpe, AnotherModelIsRefused) {
  auto json = letters({});
  json["model"]["type"] = "Unigram";
  EXPECT_TRUE(
      fails(ErrorKind::kUsage, {"the type Unigram is not supported"}, [&] { ids_of(json, "a"); }));
}

}  // namespace bpe_test
}  // namespace ferry::rollout::text
