#include "serve/api/chat_prompt.h"

#include <gtest/gtest.h>

#include <string>

namespace ferry::serve {
namespace chat_prompt_test {

// A letter is a token.
const rollout::text::Tokenizer& tokenizer() {
  static const rollout::text::Tokenizer made = [] {
    auto vocab = ordered_json::object();
    for (int i = 0; i < 26; ++i) vocab[std::string(1, static_cast<char>('a' + i))] = i;
    const ordered_json level{{"type", "ByteLevel"},
                             {"add_prefix_space", false},
                             {"trim_offsets", true},
                             {"use_regex", true}};
    const ordered_json file{
        {"added_tokens", ordered_json::array()},
        {"normalizer", nullptr},
        {"pre_tokenizer", level},
        {"post_processor", nullptr},
        {"decoder", level},
        {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", ordered_json::array()}}}};
    return rollout::text::Tokenizer(file.dump(), "letters");
  }();
  return made;
}

// The prompt of a chat of one message, whose template writes the effort alone.
std::string prompt_of(const std::string& fields, const std::string& content = R"("hi")") {
  static const ServedModel model{
      .max_model_len = 100,
      .vocab_size = 26,
      .tokenizer = &tokenizer(),
      .chat_template = rollout::text::ChatTemplate("{{ reasoning_effort }}", "template")};
  const auto body =
      parse_object(R"({"messages": [{"role": "user", "content": )" + content + "}]" + fields + "}");
  const auto tokens = chat_prompt(body, model).token_ids;
  return tokenizer().decode(std::vector<rollout::text::TokenId>(tokens.begin(), tokens.end()), {});
}

std::string error_of(const std::string& fields, const std::string& content = R"("hi")") {
  try {
    prompt_of(fields, content);
  } catch (const ApiError& error) {
    return error.what();
  }
  return "";
}

TEST(ChatPrompt, HasTheReasoningEffort) {
  EXPECT_EQ(prompt_of(""), "");
  EXPECT_EQ(prompt_of(R"(, "reasoning_effort": "low")"), "low");
  EXPECT_EQ(prompt_of(R"(, "reasoning_effort": "low", "chat_template_kwargs": {"x": 1})"), "low");
  EXPECT_EQ(prompt_of(R"(, "reasoning_effort": "low",
                         "chat_template_kwargs": {"reasoning_effort": "high"})"),
            "high");
}

TEST(ChatPrompt, IsOfNoOtherTemplate) {
  EXPECT_EQ(error_of(R"(, "chat_template": "x")"),
            "chat_template: is not supported: it is the model's");
  EXPECT_EQ(error_of(R"(, "chat_template_kwargs": {"chat_template": "x"})"),
            "chat_template_kwargs.chat_template: is not supported: it is the model's");
}

TEST(ChatPrompt, APartOfTextHasText) {
  EXPECT_EQ(error_of("", R"([{"type": "text", "text": ""}])"), "");
  EXPECT_EQ(error_of("", R"([{"type": "text"}])"), "messages.0.content.text: is missing");
  EXPECT_EQ(error_of("", R"([{"type": "refusal"}])"), "messages.0.content.refusal: is missing");
}

// A template would write another number: those of 64 bits alone have all their digits.
TEST(ChatPrompt, HasNoIntegerOfMoreThan64Bits) {
  const std::string digits = "18446744073709551616";
  EXPECT_EQ(
      error_of(R"(, "tools": [{"type": "function", "function": {"name": "f", "parameters": {
                         "properties": {"x": {"maximum": )" +
               digits + "}}}}}]"),
      "tools.0.function.parameters.properties.x.maximum: " + digits + " has more than 64 bits");
  EXPECT_EQ(error_of(R"(, "chat_template_kwargs": {"x": [)" + digits + "]}"),
            "chat_template_kwargs.x.0: " + digits + " has more than 64 bits");
  const auto call = [&](const std::string& arguments) {
    return error_of(
        "", R"("", "tool_calls": [{"function": {"name": "f", "arguments": )" + arguments + "}}]");
  };
  EXPECT_EQ(call("{\"a\": " + digits + "}"),
            "messages.0.tool_calls.0.function.arguments.a: " + digits + " has more than 64 bits");
  EXPECT_EQ(call(R"("{\"a\": {\"b\": )" + digits + R"(}}")"),
            "messages.0.tool_calls.0.function.arguments.a.b: " + digits + " has more than 64 bits");
  EXPECT_EQ(call(R"("{\"a\": 9223372036854775807}")"), "");
  EXPECT_EQ(error_of(R"(, "user": )" + digits), "");
}

}  // namespace chat_prompt_test
}  // namespace ferry::serve
