// Prompts of arguments and records: what becomes tokens, and what is wrong with one alone.
#include "cli/torch/prompts.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "distckpt/storage/file_io.h"
#include "tests/rollout/text/tokenizer/tiny_tokenizers.h"
#include "tests/support/expect.h"
#include "tests/support/temp_dir.h"

namespace ferry::cli {
namespace prompts_test {

using rollout::text::ChatTemplate;
using rollout::text::Tokenizer;
using support::is_error;
using support::TempDir;
using Ids = std::vector<std::int64_t>;

const Tokenizer& tokenizer() {
  static const Tokenizer bytes(rollout::text::byte_level_tokenizer().dump(), "tokenizer.json");
  return bytes;
}

const ChatTemplate& chat() {
  static const ChatTemplate letters(
      "{% for message in messages %}{{ message.role[0] }}{{ message.content }};{% endfor %}"
      "{% if add_generation_prompt %}a{% endif %}",
      "template");
  return letters;
}

std::vector<Prompt> of_lines(const std::string& lines, bool chats = false) {
  PromptReader reader({.tokenizer = &tokenizer(), .chat_template = chats ? &chat() : nullptr});
  reader.add_lines(lines, "input");
  return reader.take();
}

// The Error of the only prompt.
Error error_of(const std::string& line, bool chats = false) {
  const auto prompts = of_lines(line, chats);
  return prompts.size() == 1 && prompts[0].error ? *prompts[0].error
                                                 : Error(ErrorKind::kBug, "has no error");
}

TEST(PromptReader, KnowsWhetherItsTemplateAndTheSystemsMessageArePartOfAPrompt) {
  PromptReader reader({.tokenizer = &tokenizer(), .chat_template = &chat(), .system = "be"});
  reader.add_ids("7");
  EXPECT_FALSE(reader.applies_template());
  reader.add_lines(R"({"messages": [{"role": "user", "content": "x"}]})", "input");
  EXPECT_TRUE(reader.applies_template());
  EXPECT_FALSE(reader.has_system());
  reader.add_text("x");
  EXPECT_TRUE(reader.has_system());
}

TEST(PromptReader, TakesTextAndIds) {
  PromptReader reader({.tokenizer = &tokenizer()});
  reader.add_text("xab");
  reader.add_ids("7,8,9");
  const auto prompts = reader.take();
  ASSERT_EQ(prompts.size(), 2U);
  EXPECT_EQ(prompts[0].token_ids, (Ids{'x', 256}));
  EXPECT_EQ(prompts[0].text, "xab");
  EXPECT_EQ(prompts[1].token_ids, (Ids{7, 8, 9}));
  EXPECT_FALSE(prompts[1].text);
}

TEST(PromptReader, RefusesIdsThatAreNoList) {
  for (const auto* ids : {"", "1,", "1 2", "1,x", "99999999999999999999"}) {
    PromptReader reader({});
    reader.add_ids(ids);
    const auto prompts = reader.take();
    ASSERT_TRUE(prompts[0].error) << ids;
    EXPECT_TRUE(is_error(*prompts[0].error, ErrorKind::kUsage, {"is no list of token ids"}));
  }
}

TEST(PromptReader, PutsTextIntoTheTemplateBehindTheSystemsMessage) {
  PromptReader reader({.tokenizer = &tokenizer(), .chat_template = &chat(), .system = "be brief"});
  reader.add_text("hi");
  EXPECT_EQ(reader.take()[0].text, "sbe brief;uhi;a");
}

TEST(PromptReader, NumbersPromptsWithoutAnId) {
  const auto prompts = of_lines(R"({"prompt": "a", "id": "1"}
{"prompt": "b"}
{"prompt": "c", "id": 7})");
  ASSERT_EQ(prompts.size(), 3U);
  EXPECT_EQ(prompts[0].id, "1");
  EXPECT_EQ(prompts[1].id, "1_");  // its number is taken
  EXPECT_EQ(prompts[2].id, "7");
}

TEST(PromptReader, TellsOfAnIdThatComesTwiceAtTheSecond) {
  const auto prompts =
      of_lines("{\"prompt\": \"a\", \"id\": \"x\"}\n{\"prompt\": \"b\", \"id\": \"x\"}");
  EXPECT_FALSE(prompts[0].error);
  ASSERT_TRUE(prompts[1].error);
  EXPECT_TRUE(is_error(*prompts[1].error, ErrorKind::kUsage, {"id: another prompt is x already"}));
}

TEST(PromptReader, GoesOnBehindALineThatIsWrong) {
  const auto prompts = of_lines("{\"prompt\": \"a\"}\n\n{oops\n{\"prompt\": \"b\"}\n");
  ASSERT_EQ(prompts.size(), 3U);
  ASSERT_TRUE(prompts[1].error);
  EXPECT_TRUE(is_error(*prompts[1].error, ErrorKind::kCorrupt, {"input, line 3"}));
  EXPECT_EQ(prompts[2].token_ids, (Ids{'b'}));
}

TEST(PromptReader, AsksForExactlyOneKindOfPrompt) {
  EXPECT_TRUE(is_error(error_of("{}"), ErrorKind::kUsage, {"one of prompt, messages", "not 0"}));
  EXPECT_TRUE(is_error(error_of(R"({"prompt": "a", "prompt_token_ids": [1]})"), ErrorKind::kUsage,
                       {"not 2"}));
}

TEST(PromptReader, AsksForATemplateWhereThereAreMessages) {
  const auto* line = R"({"messages": [{"role": "user", "content": "ab"}]})";
  EXPECT_TRUE(is_error(error_of(line), ErrorKind::kUsage, {"ask for it by --chat"}));
  EXPECT_EQ(of_lines(line, /*chats=*/true)[0].text, "uab;a");
}

TEST(PromptReader, RefusesImagesOfAModelThatDoesNotSee) {
  EXPECT_TRUE(is_error(
      error_of(R"({"messages": [{"role": "user", "content": [{"type": "image", "image": "a"}]}]})",
               /*chats=*/true),
      ErrorKind::kUsage, {"the model's images are not computed"}));
}

TEST(PromptReader, TakesSamplingParamsOfARecord) {
  const auto line = of_lines(
      R"({"prompt": "a", "sampling_params": {"temperature": 0.5, "n": 2, "stop": "x", "seed": 9, )"
      R"("stop_token_ids": [3], "ignore_eos": true, "top_k": null}})");
  ASSERT_EQ(line.size(), 1U);
  const auto& params = line[0].params;
  EXPECT_FALSE(line[0].error);
  EXPECT_EQ(params.temperature, 0.5);
  EXPECT_EQ(params.n, 2);
  EXPECT_EQ(params.stop, (std::vector<std::string>{"x"}));
  EXPECT_EQ(params.seed, 9U);
  EXPECT_EQ(params.stop_token_ids, (Ids{3}));
  EXPECT_TRUE(params.ignore_eos);
  EXPECT_EQ(params.top_k, rollout::SamplingParams().top_k);
}

TEST(PromptReader, ASeedOfMinusOneIsNone) {
  const auto line = of_lines(R"({"prompt": "a", "sampling_params": {"seed": -1}})");
  ASSERT_EQ(line.size(), 1U);
  EXPECT_FALSE(line[0].error);
  EXPECT_FALSE(line[0].params.seed);
}

TEST(PromptReader, NamesTheSamplingParamThatIsWrong) {
  const auto with = [](const std::string& params) {
    return error_of("{\"prompt\": \"a\", \"sampling_params\": " + params + "}");
  };
  EXPECT_TRUE(
      is_error(with("{\"heat\": 1}"), ErrorKind::kUsage, {"sampling_params: there is no heat"}));
  EXPECT_TRUE(is_error(with("{\"n\": 1.5}"), ErrorKind::kUsage,
                       {"sampling_params.n: 1.5 is not a whole number"}));
  EXPECT_TRUE(is_error(with("{\"seed\": -2}"), ErrorKind::kUsage, {"sampling_params.seed: -2"}));
  EXPECT_TRUE(is_error(with("[]"), ErrorKind::kUsage, {"sampling_params: is not an object"}));
}

TEST(PromptReader, NamesFileAndRecord) {
  const TempDir dir;
  distckpt::write_text(dir / "prompts.jsonl", "{\"prompt\": \"a\"}\n{\"prompt\": 3}\n");
  PromptReader reader({.tokenizer = &tokenizer(), .chat_template = &chat()});
  reader.add_file((dir / "prompts.jsonl").string());
  const auto prompts = reader.take();
  ASSERT_EQ(prompts.size(), 2U);
  ASSERT_TRUE(prompts[1].error);
  EXPECT_TRUE(is_error(*prompts[1].error, ErrorKind::kUsage,
                       {"messages: is not a list of messages", "prompts.jsonl"}));
}

TEST(PromptReader, AsksForATokenizerWhereThePromptIsText) {
  PromptReader reader({});
  reader.add_text("a");
  const auto prompts = reader.take();
  ASSERT_TRUE(prompts[0].error);
  EXPECT_TRUE(is_error(*prompts[0].error, ErrorKind::kUsage, {"has no tokenizer", "--tokenizer"}));
}

TEST(PromptReader, RefusesTextThatIsEmptyOrNotUtf8) {
  PromptReader reader({.tokenizer = &tokenizer()});
  reader.add_text("");
  reader.add_text("\xff");
  const auto prompts = reader.take();
  ASSERT_TRUE(prompts[0].error && prompts[1].error);
  EXPECT_TRUE(is_error(*prompts[0].error, ErrorKind::kUsage, {"the prompt is empty"}));
  EXPECT_TRUE(is_error(*prompts[1].error, ErrorKind::kUsage, {"the prompt is not UTF-8"}));
}

}  // namespace prompts_test
}  // namespace ferry::cli
