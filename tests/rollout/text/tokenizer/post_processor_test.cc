#include "rollout/text/tokenizer/post_processor.h"

#include <gtest/gtest.h>

#include "tests/support/expect.h"

namespace ferry::rollout::text {
namespace post_processor_test {

using nlohmann::json;
using Ids = std::vector<TokenId>;

PostProcessor read(const char* settings) {
  return read_post_processor(json::parse(settings), "post_processor");
}

TEST(PostProcessor, NullAddsNothing) {
  const auto processor = read("null");
  EXPECT_EQ(processor.before, Ids{});
  EXPECT_EQ(processor.behind, Ids{});
}

TEST(PostProcessor, ATemplateAddsOnBothSides) {
  const auto processor = read(R"({"type": "TemplateProcessing",
      "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}},
                 {"SpecialToken": {"id": "</s>"}}],
      "special_tokens": {"<s>": {"ids": [1]}, "</s>": {"ids": [2, 3]}}})");
  EXPECT_EQ(processor.before, Ids{1});
  EXPECT_EQ(processor.behind, (Ids{2, 3}));
}

TEST(PostProcessor, ALaterTemplateStandsOutside) {
  const auto processor = read(R"({"type": "Sequence", "processors": [
      {"type": "ByteLevel"},
      {"type": "TemplateProcessing", "special_tokens": {"a": {"ids": [1]}},
       "single": [{"SpecialToken": {"id": "a"}}, {"Sequence": {"id": "A"}}]},
      {"type": "TemplateProcessing", "special_tokens": {"b": {"ids": [2]}},
       "single": [{"SpecialToken": {"id": "b"}}, {"Sequence": {"id": "A"}}]}]})");
  EXPECT_EQ(processor.before, (Ids{2, 1}));
}

TEST(PostProcessor, ATemplateWithoutItsTextIsRefused) {
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"a template without its text"}, [] {
    read(R"({"type": "TemplateProcessing", "single": [], "special_tokens": {}})");
  }));
}

TEST(PostProcessor, ASpecialTokenWithoutIdsIsNamed) {
  EXPECT_TRUE(support::fails(ErrorKind::kCorrupt, {"post_processor", "<s>"}, [] {
    read(R"({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}],
             "special_tokens": {}})");
  }));
}

TEST(PostProcessor, AnUnknownTypeIsRefused) {
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"the type RobertaProcessing is not supported"},
                             [] { read(R"({"type": "RobertaProcessing"})"); }));
}

}  // namespace post_processor_test
}  // namespace ferry::rollout::text
