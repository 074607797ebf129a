#include "serve/api/chat_prompt.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>

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

// The text with these digits for each '#'.
std::string with_digits(std::string_view text, const std::string& digits) {
  std::string all;
  for (const char c : text) c == '#' ? all.append(digits) : all.append(1, c);
  return all;
}

// Python's integers have any size.
TEST(ChatPrompt, KeepsTheDigitsOfIntegers) {
  const rollout::text::ChatTemplate shown(
      "{{ messages[0].tool_calls | tojson }}{{ tools | tojson }}{{ x }}", "template");
  for (const std::string digits : {"18446744073709551615", "-184467440737095516160000"}) {
    const auto body = parse_object(with_digits(
        R"({"messages": [{"role": "assistant", "content": "", "tool_calls": [
              {"function": {"arguments": "{\"a\": [#]}"}}, {"function": {"arguments": {"b": #}}}]}],
            "tools": [{"maximum": #}], "chat_template_kwargs": {"x": #}, "user": #})",
        digits));
    const auto text = shown.apply(
        chat_messages(body), {.tools = body["tools"], .variables = body["chat_template_kwargs"]});
    EXPECT_EQ(text, with_digits(R"([{"function": {"arguments": {"a": [#]}}}, )"
                                R"({"function": {"arguments": {"b": #}}}][{"maximum": #}]#)",
                                digits));
    EXPECT_TRUE(body["user"].is_number());
  }
}

}  // namespace chat_prompt_test
}  // namespace ferry::serve
