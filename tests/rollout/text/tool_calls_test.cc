#include "rollout/text/tool_calls.h"

#include <gtest/gtest.h>

namespace ferry::rollout::text {
namespace tool_calls_test {

using nlohmann::ordered_json;

const ordered_json kTools = ordered_json::parse(
    R"([{"type": "function", "function": {"name": "f", "parameters": {"properties": {"s": {"type": "string"}, "n": {"type": "integer"}}}}}])");

// The content and the calls of a text that comes in parts of so many bytes.
std::pair<std::string, std::vector<ToolCall>> parsed(ToolFormat format,
                                                     const std::string& text,
                                                     std::size_t size) {
  ToolCallParser parser(format, kTools);
  std::pair<std::string, std::vector<ToolCall>> all;
  const auto add = [&](ToolCallParser::Part part) {
    all.first += part.content;
    all.second.insert(all.second.end(), part.calls.begin(), part.calls.end());
  };
  for (std::size_t at = 0; at < text.size(); at += size) add(parser.take(text.substr(at, size)));
  add(parser.finish());
  return all;
}

// Whatever parts a text comes in, it is read alike.
void expect(ToolFormat format,
            const std::string& text,
            const std::string& content,
            const std::vector<ToolCall>& calls) {
  for (std::size_t size = 1; size <= text.size() + 1; ++size) {
    const auto [found_content, found_calls] = parsed(format, text, size);
    ASSERT_EQ(found_content, content) << size;
    ASSERT_EQ(found_calls, calls) << size;
  }
}

TEST(ToolCalls, HermesWritesJson) {
  expect(ToolFormat::kHermes,
         "Let me see.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"s\": \"</tool>é\", \"n\": "
         "1}}\n</tool_call>\n"
         "<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>",
         "Let me see.", {{"f", R"({"s":"</tool>é","n":1})"}, {"g", "{}"}});
}

TEST(ToolCalls, QwenCoderWritesTags) {
  expect(ToolFormat::kHermes,
         "<tool_call>\n<function=f>\n<parameter=s>\n12\nlines\n</parameter>\n<parameter=n>\n12\n</"
         "parameter>\n</function>\n</tool_call>",
         "", {{"f", R"({"s":"12\nlines","n":12})"}});
}

TEST(ToolCalls, GlmWritesKeysAndValues) {
  expect(ToolFormat::kHermes,
         "\n<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>12</arg_value>\n<arg_key>n</"
         "arg_key>\n<arg_value>12</arg_value>\n"
         "<arg_key>other</arg_key>\n<arg_value>[1, "
         "\"x\"]</arg_value>\n</tool_call>\n<tool_call>g\n</tool_call>",
         "", {{"f", R"({"s":"12","n":12,"other":[1,"x"]})"}, {"g", "{}"}});
}

TEST(ToolCalls, Llama3IsACallOrText) {
  expect(
      ToolFormat::kLlama3Json,
      R"(<|python_tag|>{"name": "f", "parameters": {"s": "a;b"}}; {"name": "g", "parameters": {}})",
      "", {{"f", R"({"s":"a;b"})"}, {"g", "{}"}});
  expect(ToolFormat::kLlama3Json, "It is {\"name\": \"f\"}.", "It is {\"name\": \"f\"}.", {});
  expect(ToolFormat::kLlama3Json, "{\"name\": 3}", "{\"name\": 3}", {});
}

TEST(ToolCalls, DeepSeekWritesItsOwnTokens) {
  expect(ToolFormat::kDeepSeekV3,
         "Yes.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"n\": "
         "1}\n```<｜tool▁call▁end｜>\n"
         "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{\"n\": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
         "Yes.", {{"f", R"({"n":1})"}, {"g", R"({"n":2})"}});
}

TEST(ToolCalls, DeepSeeksStringsMayHaveBackticks) {
  expect(ToolFormat::kDeepSeekV3,
         "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"s\": \"```\"}\n```"
         "<｜tool▁call▁end｜>",
         "", {{"f", R"({"s":"```"})"}});
}

TEST(ToolCalls, AFrameThatAnotherLeavesBehindIsText) {
  expect(ToolFormat::kDeepSeekV3, "<｜tool▁calls▁<｜tool▁calls▁end｜>end｜>",
         "<｜tool▁calls▁end｜>", {});
}

TEST(ToolCalls, ACallThatDoesNotParseIsText) {
  for (const std::string text : {"<tool_call>\n{\"name\": \"f\", \"arguments\": \n</tool_call>",
                                 "a <tool_call>\n{\"name\": \"f\"", "<tool_cal", "<tool_call>",
                                 "a < b <tool_call>{\"arguments\": {}}</tool_call> c"})
    expect(ToolFormat::kHermes, text, text, {});
}

TEST(ToolCalls, TextKeepsItsWhiteSpace) {
  expect(ToolFormat::kHermes, " a\n\n b \n", " a\n\n b \n", {});
  expect(ToolFormat::kDeepSeekV3, "<｜tool a ", "<｜tool a ", {});
}

TEST(ToolCalls, ATemplateTellsItsFormat) {
  EXPECT_EQ(tool_format_of_template("{{ '<tool_call>' }}"), ToolFormat::kHermes);
  EXPECT_EQ(tool_format_of_template("{{ '<tool_call><function=' }}"), ToolFormat::kQwen3Coder);
  EXPECT_EQ(tool_format_of_template("{{ '<tool_call><arg_key>' }}"), ToolFormat::kGlm45);
  EXPECT_EQ(tool_format_of_template("{{ '<｜tool▁calls▁begin｜>```json' }}"),
            ToolFormat::kDeepSeekV3);
  EXPECT_EQ(tool_format_of_template("{{ '<｜tool▁calls▁begin｜>' }}"), ToolFormat::kDeepSeekV31);
  EXPECT_EQ(tool_format_of_template(R"({% if tools %}'"parameters": '{% endif %})"),
            ToolFormat::kLlama3Json);
  EXPECT_EQ(tool_format_of_template("{{ messages }}"), std::nullopt);
}

}  // namespace tool_calls_test
}  // namespace ferry::rollout::text
