#include "rollout/text/answer_reader.h"

#include <gtest/gtest.h>

namespace ferry::rollout::text {
namespace answer_reader_test {

using nlohmann::ordered_json;

const ordered_json kTools = ordered_json::parse(R"([{"function": {"name": "f"}}])");
const std::string kCall = "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>";

// Reads an answer behind a prompt, in parts of so many bytes: whatever they are, it is read alike.
void expect(const std::string& parser,
            const ReasoningPrompt& prompt,
            const std::string& answer,
            const std::string& reasoning,
            const std::string& content,
            std::size_t num_calls = 0,
            ToolFormat format = ToolFormat::kHermes) {
  for (std::size_t size = 1; size <= answer.size() + 1; ++size) {
    AnswerReader reader(thoughts_behind(prompt, find_in(kReasoningFormats, parser).value()), format,
                        kTools);
    AnswerPart all;
    const auto add = [&](const AnswerPart& part) {
      all.reasoning += part.reasoning;
      all.content += part.content;
      all.calls.insert(all.calls.end(), part.calls.begin(), part.calls.end());
    };
    for (std::size_t at = 0; at < answer.size(); at += size)
      add(reader.take(answer.substr(at, size)));
    add(reader.finish());
    ASSERT_EQ(all.reasoning, reasoning) << parser << " " << size;
    ASSERT_EQ(all.content, content) << parser << " " << size;
    ASSERT_EQ(all.calls.size(), num_calls) << parser << " " << size;
  }
}

TEST(AnswerReader, ThoughtsEndAtTheirMarker) {
  const std::string answer = "<think>\na < b\n</think>\n\nyes </think>";
  for (const auto* const parser : {"deepseek_r1", "glm45", "qwen3", "kimi_k2", "step3"}) {
    expect(parser, {.text = "ai:"}, answer, "\na < b\n", "\n\nyes </think>");
    expect(parser, {.text = "ai:"}, "\n" + answer, "\na < b\n", "\n\nyes </think>");
    expect(parser, {.text = "ai:<think>\n"}, "a</think>b", "a", "b");
    expect(parser, {.text = "ai:"}, "a</think>b", "a", "b");
    expect(parser, {.text = "ai:"}, " no end </thi", " no end </thi", "");
  }
  expect("seed_oss", {.text = "ai:"}, "<seed:think>a</think></seed:think>b", "a</think>", "b");
}

TEST(AnswerReader, APromptThatEndsThoughtsHasAnAnswerWithout) {
  for (const auto* const parser : {"qwen3", "deepseek_v3", "minimax_m2_append_think"}) {
    expect(parser, {.text = "ai:<think>\n\n</think>\n\n"}, "a</think>b", "", "a</think>b");
    expect(parser, {.text = "ai:</think>"}, "<think>b", "", "<think>b");
  }
  // Markers of an earlier answer say nothing, unless it is the answer that goes on.
  const std::string before = "ai:<think>x</think>y\nuser:z\nai:";
  expect("qwen3", {.text = before}, "a</think>b", "a", "b");
  expect("qwen3", {.text = "ai:<think>x</think>y", .is_answer = true}, "a", "", "a");
  expect("qwen3", {.text = "ai:<think>x", .is_answer = true}, "a</think>b", "a", "b");
}

TEST(AnswerReader, SomeModelsThinkWhereTheyAreAskedTo) {
  const std::string answer = "a</think>b";
  expect("deepseek_v3", {.text = "ai:"}, answer, "", answer);
  expect("deepseek_v3", {.text = "ai:<think>"}, answer, "a", "b");
  expect("deepseek_v3", {.text = "ai:", .may_think = true}, answer, "a", "b");
  expect("qwen3", {.text = "ai:", .may_think = false}, answer, "", answer);
  expect("mistral", {.text = "ai:"}, "[THINK]a[/THINK]b", "a", "b");
  expect("mistral", {.text = "ai:"}, "b", "", "b");
}

TEST(AnswerReader, GraniteSaysThatItThinks) {
  for (const std::string is : {"Here is", "Here's"}) {
    expect("granite", {.text = "ai:"},
           is + " my thought process:a Here is " + is + " my response: b", "a Here is ", " b");
    expect("granite", {.text = "ai:"}, is + " my thought process: a", " a", "");
  }
  expect("granite", {.text = "ai:"}, "Here is my thought", "", "Here is my thought");
  expect("granite", {.text = "ai:"}, "Here is my response: b", "", "Here is my response: b");
}

TEST(AnswerReader, GemmaThinksOnAChannel) {
  expect("gemma4", {.text = "ai:"}, "<|channel>thought\na<channel|>b", "a", "b");
  expect("gemma4", {.text = "ai:"}, "b", "", "b");
  expect("gemma4", {.text = "ai:<|channel>thought\n<channel|>"}, "b", "", "b");
  expect("gemma4", {.text = "ai:<|channel>thought\n"}, "a<channel|>b", "a", "b");
}

TEST(AnswerReader, AnAnswerMayStandBetweenMarkers) {
  expect("ernie45", {.text = "ai:<think>\n"},
         "a\n</think>\n\n<response>\nd < e\n\nf\n</response>\n", "a\n", "d < e\n\nf");
  expect("ernie45", {.text = "ai:"}, "a</think><response>b</response>\n" + kCall, "a", "b", 1);
  expect("ernie45", {.text = "ai:"}, "a</think>\nb\n", "a", "\nb\n");
  expect("ernie45", {.text = "ai:"}, "a</think>\n<respon", "a", "\n<respon");
  expect("ernie45", {.text = "ai:"}, "a</think><response>\nb\n</resp", "a", "b\n</resp");
  const std::string answer = "<answer>\nb\n</answer>";
  expect("hunyuan_a13b", {.text = "ai:"}, "<think>\na\n</think>\n" + answer, "a", "b");
  expect("hunyuan_a13b", {.text = "ai:"}, "<think>\n\n</think>\n" + answer, "", "b");
  expect("hunyuan_a13b", {.text = "ai:<think>\n\n</think>\n"}, "b", "", "b");
  expect("hunyuan_a13b", {.text = "ai:"}, "b\n", "", "b\n");
}

TEST(AnswerReader, CallsWithinThoughtsAreNone) {
  expect("qwen3", {.text = "ai:"}, "a" + kCall + "</think>" + kCall, "a" + kCall, "", 1);
  expect("minimax_m2_append_think", {.text = "ai:<think>\n"}, "a" + kCall + "</think>b" + kCall, "",
         "<think>a" + kCall + "</think>b", 1);
  // A call of these families ends thoughts that have no end.
  expect("qwen3", {.text = "ai:"}, "a<tool_call>\n<function=f>\n</function>\n</tool_call>", "a", "",
         1, ToolFormat::kQwen3Coder);
  expect("kimi_k2", {.text = "ai:"},
         "a<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
         "{}<|tool_call_end|><|tool_calls_section_end|>",
         "a", "", 1, ToolFormat::kKimiK2);
}

}  // namespace answer_reader_test
}  // namespace ferry::rollout::text
