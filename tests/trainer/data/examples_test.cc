#include "trainer/data/examples.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "distckpt/base/error.h"
#include "tests/support/expect.h"

namespace ferry::trainer {
namespace examples_test {

using support::fails;

Conversation conversation(const char* text) {
  return parse_conversation(Record::parse(text), {});
}
PromptExample prompt(const char* text) {
  return parse_prompt(Record::parse(text));
}

TEST(Conversation, ComesOutOfMessages) {
  const auto found = conversation(
      R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "id": 3})");
  EXPECT_EQ(found.messages.dump(),
            R"([{"role":"user","content":"a"},{"role":"assistant","content":"b"}])");
  EXPECT_TRUE(found.tools.is_null());
}

TEST(Conversation, ComesOutOfAPromptAndItsResponse) {
  const char* expected = R"([{"role":"user","content":"a"},{"role":"assistant","content":"b"}])";
  EXPECT_EQ(conversation(R"({"prompt": "a", "response": "b"})").messages.dump(), expected);
  EXPECT_EQ(
      conversation(
          R"({"prompt": [{"role": "user", "content": "a"}], "response": "b", "messages": null})")
          .messages.dump(),
      expected);
  EXPECT_EQ(parse_conversation(Record::parse(R"({"question": "a", "answer": "b"})"),
                               {.prompt_key = "question", .response_key = "answer"})
                .messages.dump(),
            expected);
}

TEST(Conversation, KeepsToolsAndTheirCalls) {
  const auto found = conversation(
      R"({"tools": [{"name": "f"}], "messages": [{"role": "assistant", "content": null, "tool_calls": [1]}]})");
  EXPECT_EQ(found.tools.dump(), R"([{"name":"f"}])");
  EXPECT_EQ(found.messages[0]["tool_calls"].dump(), "[1]");
}

TEST(Conversation, NamesTheColumnThatIsWrong) {
  const std::vector<std::pair<const char*, std::string_view>> wrong{
      {R"({})", "messages: is missing, and so is prompt"},
      {R"({"prompt": "a"})", "response: is missing"},
      {R"({"prompt": "a", "response": 3})", "response: is a JSON number, text is expected"},
      {R"({"prompt": 1, "response": "b"})", "prompt: is a JSON number, a list of messages"},
      {R"({"messages": []})", "messages: has no message"},
      {R"({"messages": "hello"})", "messages: is a JSON string"},
      {R"({"messages": ["hello"]})", "messages[0]: is a JSON string"},
      {R"({"messages": [{"content": "a"}]})", "messages[0].role: is missing"},
      {R"({"messages": [{"role": "", "content": "a"}]})", "messages[0].role: is empty"},
      {R"({"messages": [{"role": "assistant"}]})", "messages[0].content: is missing"},
      {R"({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "image"}]}]})",
       "an image has neither image nor path"},
      {R"({"messages": [{"role": "user", "content": ["a"]}]})",
       "messages[0].content: is a JSON string, a part is expected"},
      {R"({"messages": [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "b"}], "images": ["a", "b"]})",
       "images: there are 2, and the messages have places for 1"},
      {R"({"messages": [{"role": "user", "content": "a"}]})", "the assistant says nothing"},
      {R"({"tools": {}, "prompt": "a", "response": "b"})", "tools: is a JSON object"},
  };
  for (const auto& [text, message] : wrong)
    EXPECT_TRUE(fails(ErrorKind::kCorrupt, {message}, [&] { conversation(text); })) << text;
}

constexpr const char* kGsm8k = R"({"data_source": "openai/gsm8k",
  "prompt": [{"role": "user", "content": "1+1?"}], "ability": "math",
  "reward_model": {"style": "rule", "ground_truth": "2"}, "extra_info": {"split": "train", "index": 0}})";

TEST(Prompt, HoldsTheColumnsOfVerl) {
  const auto found = prompt(kGsm8k);
  EXPECT_EQ(found.data_source, "openai/gsm8k");
  EXPECT_EQ(found.prompt.dump(), R"([{"role":"user","content":"1+1?"}])");
  EXPECT_EQ(found.ability, "math");
  EXPECT_EQ(found.reward_model.style, "rule");
  EXPECT_EQ(found.reward_model.ground_truth, "2");
  EXPECT_EQ(found.extra_info.dump(), R"({"split":"train","index":0})");
}

TEST(Prompt, MayBeText) {
  auto record = Record::parse(kGsm8k);
  record["prompt"] = "1+1?";
  EXPECT_EQ(parse_prompt(record).prompt, prompt(kGsm8k).prompt);
  record["prompt"] = 3;
  EXPECT_TRUE(
      fails(ErrorKind::kCorrupt, {"prompt: is a JSON number"}, [&] { parse_prompt(record); }));
}

TEST(Prompt, PassesOverAnAbilityThatIsNoText) {
  auto record = Record::parse(kGsm8k);
  record["ability"] = {"math", 1};
  EXPECT_EQ(parse_prompt(record).ability, "");
}

TEST(Prompt, NeedsNoAbilityNoExtraInfoAndNoTruthForAModel) {
  const auto found = prompt(
      R"({"data_source": "a", "prompt": [{"role": "user", "content": ""}], "extra_info": null, "reward_model": {"style": "model"}})");
  EXPECT_EQ(found.ability, "");
  EXPECT_TRUE(found.extra_info.is_null());
  EXPECT_TRUE(found.reward_model.ground_truth.is_null());
}

TEST(Prompt, NamesTheColumnThatIsWrong) {
  const std::vector<std::pair<const char*, std::string_view>> wrong{
      {"/data_source", "data_source: is missing"},
      {"/prompt", "prompt: is missing"},
      {"/reward_model", "reward_model: is missing"},
      {"/reward_model/style", "reward_model.style: is missing"},
      {"/reward_model/ground_truth", "reward_model.ground_truth: is missing"},
      {"/prompt/0/role", "prompt[0].role: is missing"},
  };
  for (const auto& [pointer, message] : wrong) {
    auto record = Record::parse(kGsm8k);
    const Record::json_pointer at(pointer);
    record[at.parent_pointer()].erase(at.back());
    EXPECT_TRUE(fails(ErrorKind::kCorrupt, {message}, [&] { parse_prompt(record); })) << pointer;
  }
  auto record = Record::parse(kGsm8k);
  record["extra_info"] = 3;
  EXPECT_TRUE(
      fails(ErrorKind::kCorrupt, {"extra_info: is a JSON number"}, [&] { parse_prompt(record); }));
}

}  // namespace examples_test
}  // namespace ferry::trainer
