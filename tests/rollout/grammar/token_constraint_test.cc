#include "rollout/grammar/token_constraint.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <set>
#include <string>

namespace ferry::rollout::grammar {
namespace token_constraint_test {

// Tokens by their ids: bytes, one of them 0xFF, words, a character in two parts, two added ones.
constexpr auto kTokenizer = R"({
  "added_tokens": [{"id": 10, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true},
                   {"id": 11, "content": "<call>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
  "normalizer": null, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
  "post_processor": null, "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
  "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
            "byte_fallback": false, "vocab": {"a": 0, "b": 1, "ab": 2, "<": 3, "call": 4, ">": 5, "Ã": 6, "©": 7, "Ġ": 8, "ÿ": 9}, "merges": [["a", "b"]]}})";

struct Fixture {
  text::Tokenizer tokenizer{kTokenizer, "test"};
  StructuredOutputManager manager{tokenizer, 12};
  std::shared_ptr<const std::vector<std::int64_t>> ending =
      std::make_shared<const std::vector<std::int64_t>>(1, 10);

  TokenConstraint constraint(const std::string& format) {
    return {manager.compile(format), ending};
  }
};

std::set<std::int64_t> allowed(TokenConstraint& constraint) {
  std::vector<std::uint8_t> bits(2);
  constraint.write_allowed(bits);
  std::set<std::int64_t> ids;
  for (std::int64_t i = 0; i < 16; ++i)
    if ((bits[static_cast<std::size_t>(i / 8)] >> i % 8 & 1) != 0) ids.insert(i);
  return ids;
}

using Ids = std::set<std::int64_t>;

TEST(TokenConstraint, AllowsTokensWhoseBytesLeadOn) {
  Fixture fixture;
  auto constraint = fixture.constraint(R"({"type": "regex", "pattern": "a?b é+"})");
  EXPECT_EQ(allowed(constraint), (Ids{0, 1, 2}));
  constraint.accept(0);
  EXPECT_EQ(allowed(constraint), Ids{1});
  constraint.accept(1);
  EXPECT_EQ(allowed(constraint), Ids{8});
  constraint.accept(8);
  EXPECT_EQ(allowed(constraint), Ids{6});
  constraint.accept(6);
  EXPECT_EQ(allowed(constraint), Ids{7});
  constraint.accept(7);
  EXPECT_EQ(allowed(constraint), (Ids{6, 10}));
  EXPECT_FALSE(constraint.is_complete());
}

TEST(TokenConstraint, WritesAnAddedTokenAsItselfAlone) {
  Fixture fixture;
  auto marker = fixture.constraint(R"({"type": "const_string", "value": "a<call>b"})");
  marker.accept(0);
  EXPECT_EQ(allowed(marker), Ids{11});
  auto text = fixture.constraint(R"({"type": "regex", "pattern": "<call>"})");
  EXPECT_EQ(allowed(text), Ids{3});
}

TEST(TokenConstraint, AllowsTheEndAloneWhenTheTextIsComplete) {
  Fixture fixture;
  auto constraint = fixture.constraint(R"({"type": "const_string", "value": "ab"})");
  EXPECT_EQ(allowed(constraint), (Ids{0, 2}));
  constraint.accept(2);
  EXPECT_TRUE(constraint.is_complete());
  EXPECT_TRUE(constraint.may_end());
  EXPECT_EQ(allowed(constraint), Ids{10});
}

TEST(TokenConstraint, EndsWhereTheVocabularyCannotGoOn) {
  Fixture fixture;
  auto constraint = fixture.constraint(R"({"type": "const_string", "value": "az"})");
  constraint.accept(0);
  EXPECT_EQ(allowed(constraint), Ids{10});
  EXPECT_FALSE(constraint.may_end());
  EXPECT_FALSE(constraint.has_left());
  constraint.accept(1);
  EXPECT_TRUE(constraint.has_left());
  EXPECT_FALSE(constraint.may_end());
}

// Each token leads to a state of some hundred places more.
TEST(TokenConstraint, EndsWhereItsGrammarTakesTooMuchWork) {
  Fixture fixture;
  std::string ways;
  for (int i = 0; i < 240; ++i) ways += fmt::format("{}a[ab]{{{}}}", i > 0 ? "|" : "", 400 + i);
  auto constraint =
      fixture.constraint(R"x({"type": "regex", "pattern": "[ab]*()x" + ways + R"x()"})x");
  int count = 0;
  Ids last;
  for (; !constraint.has_left() && count < 400; ++count) {
    last = allowed(constraint);
    constraint.accept(0);
  }
  EXPECT_GT(count, 50);
  EXPECT_LT(count, 400);
  EXPECT_EQ(last.size(), 16);
  EXPECT_FALSE(constraint.may_end());
}

TEST(TokenConstraint, GoesOnForeverWhereItsGrammarIsSmall) {
  Fixture fixture;
  auto constraint = fixture.constraint(R"({"type": "regex", "pattern": "(a{0,200}b)*"})");
  for (int i = 0; i < 100'000; ++i) {
    ASSERT_TRUE(allowed(constraint).contains(i % 3));
    constraint.accept(i % 3);
  }
}

TEST(StructuredOutputManager, KeepsWhatItCompiled) {
  Fixture fixture;
  const std::string format = R"({"type": "const_string", "value": "ab"})";
  EXPECT_EQ(fixture.manager.compile(format), fixture.manager.compile(format));
}

}  // namespace token_constraint_test
}  // namespace ferry::rollout::grammar
