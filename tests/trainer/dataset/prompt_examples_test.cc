// Prompts as tokens, and the turns that follow answers.
#include "trainer/dataset/prompt_examples.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/expect.h"
#include "tests/trainer/dataset/byte_folder.h"

namespace ferry::trainer {
namespace prompt_examples_test {

using support::ByteFolder;
using support::fails;

PromptExample example(const char* messages) {
  return {.prompt = Messages::parse(messages)};
}

const char* const kHi = R"([{"role": "user", "content": "hi"}])";

std::string text_of(const PromptEncoder& encoder, const std::vector<std::int64_t>& tokens) {
  return encoder.decode(tokens, /*skip_special_tokens=*/false);
}

TEST(PromptEncoder, EndsAPromptWhereTheAnswerBegins) {
  const ByteFolder folder;
  const PromptEncoder encoder(folder.path(), {});
  EXPECT_EQ(text_of(encoder, encoder.encode(example(kHi)).tokens), "uhi<s>a");
}

TEST(PromptEncoder, TakesOneMessageOfTextWithoutATemplate) {
  const ByteFolder folder("");
  const PromptEncoder encoder(folder.path(), {});
  EXPECT_EQ(text_of(encoder, encoder.encode(example(kHi)).tokens), "hi");
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"without a chat template it is one message"}, [&] {
    encoder.encode(example(R"([{"role": "system", "content": "be"},
                               {"role": "user", "content": "hi"}])"));
  }));
}

TEST(PromptEncoder, RefusesAPromptThatIsTooLong) {
  const ByteFolder folder;
  const PromptEncoder encoder(folder.path(), {.max_prompt_length = 4});
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"5 tokens, more than data.max_prompt_length of 4"},
                    [&] { encoder.encode(example(kHi)); }));
}

TEST(PromptEncoder, CallsAPromptMalformedThatIsFiltered) {
  const ByteFolder folder;
  const PromptEncoder encoder(folder.path(),
                              {.max_prompt_length = 4, .filter_overlong_prompts = true});
  EXPECT_TRUE(
      fails(ErrorKind::kCorrupt, {"5 tokens, more than"}, [&] { encoder.encode(example(kHi)); }));
}

TEST(PromptEncoder, CutsTheSideThatItIsToldTo) {
  const ByteFolder folder;
  const auto cut = [&](Truncation truncation) {
    const PromptEncoder encoder(folder.path(), {.max_prompt_length = 4, .truncation = truncation});
    return text_of(encoder, encoder.encode(example(kHi)).tokens);
  };
  EXPECT_EQ(cut(Truncation::kLeft), "hi<s>a");
  EXPECT_EQ(cut(Truncation::kRight), "uhi<s>");
  EXPECT_EQ(cut(Truncation::kMiddle), "uh<s>a");
}

TEST(PromptEncoder, ShowsTheToolsThatARecordSelects) {
  const ByteFolder folder(
      "{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}"
      "{% for message in messages %}{{ message.content }}{% endfor %}");
  const auto tools = nlohmann::ordered_json::parse(
      R"([{"function": {"name": "a"}}, {"function": {"name": "b"}}, {"function": {"name": "c"}}])");
  const PromptEncoder encoder(folder.path(), {}, tools);
  const auto shown = [&](const char* extra_info) {
    auto one = example(kHi);
    one.extra_info = Record::parse(extra_info);
    return text_of(encoder, encoder.encode(one).tokens);
  };
  EXPECT_EQ(shown("null"), "[a][b][c]hi");
  EXPECT_EQ(shown(R"({"tool_selection": ["c", "a", "none"]})"), "[c][a]hi");
  EXPECT_EQ(shown(R"({"tool_selection": []})"), "[a][b][c]hi");
  EXPECT_EQ(shown(R"({"tool_selection": ["none"]})"), "hi");
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"extra_info.tool_selection: is a JSON string"},
                    [&] { shown(R"({"tool_selection": "a"})"); }));
}

constexpr auto* kTurns = R"([{"role": "user", "content": "hi"},
                             {"role": "assistant", "content": "yo"},
                             {"role": "tool", "content": "FERRY"}])";

TEST(PromptEncoder, BeginsATurnBehindTheEndOfTheAnswer) {
  const ByteFolder folder;
  const PromptEncoder encoder(folder.path(), {});
  EXPECT_EQ(text_of(encoder, encoder.encode_turn(Messages::parse(kTurns), 1, nullptr)),
            "tFERRY<s>a");
}

TEST(PromptEncoder, MakesOfPromptAnswerAndTurnTheWholeConversation) {
  const ByteFolder folder;
  const PromptEncoder encoder(folder.path(), {});
  const auto messages = Messages::parse(kTurns);
  auto tokens = encoder.encode(example(kHi)).tokens;
  for (const char letter : std::string("yo")) tokens.push_back(letter);
  tokens.push_back(support::kEndOfText);
  for (const auto token : encoder.encode_turn(messages, 1, nullptr)) tokens.push_back(token);
  EXPECT_EQ(tokens, encoder.encode_messages(messages, nullptr));
}

TEST(PromptEncoder, RefusesATemplateThatDoesNotEndAnAnswer) {
  const ByteFolder folder("{% for message in messages %}{{ message.content }};{% endfor %}");
  const PromptEncoder encoder(folder.path(), {});
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"puts no token that ends an answer"},
                    [&] { encoder.encode_turn(Messages::parse(kTurns), 1, nullptr); }));
}

TEST(PromptEncoder, AsksForATemplateForSeveralTurns) {
  const ByteFolder folder("");
  const PromptEncoder encoder(folder.path(), {});
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"needs the model's chat template"},
                    [&] { encoder.encode_messages(Messages::parse(kTurns), nullptr); }));
}

}  // namespace prompt_examples_test
}  // namespace ferry::trainer
