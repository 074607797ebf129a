#include "rollout/text/tool_calls.h"

#include <gtest/gtest.h>

#include <tuple>

namespace ferry::rollout::text {
namespace tool_calls_test {

using nlohmann::ordered_json;

const ordered_json kTools = ordered_json::parse(
    R"([{"type": "function", "function": {"name": "f", "parameters": {"properties": {"s": {"type": "string"}, "n": {"type": "integer"}}}}}])");

// The meaning of a text that comes in parts of so many bytes.
AnswerPart parsed(ToolFormat format,
                  const std::string& text,
                  std::size_t size,
                  const ordered_json& tools) {
  ToolCallParser parser(format, tools);
  AnswerPart all;
  const auto add = [&](AnswerPart part) {
    all.content += part.content;
    all.reasoning += part.reasoning;
    all.calls.insert(all.calls.end(), part.calls.begin(), part.calls.end());
  };
  for (std::size_t at = 0; at < text.size(); at += size) add(parser.take(text.substr(at, size)));
  add(parser.finish());
  return all;
}

// Whatever parts a text comes in, it is read alike.
void expect(ToolFormat format,
            const std::string& text,
            const std::string& content,
            const std::vector<ToolCall>& calls,
            const std::string& reasoning = "",
            const ordered_json& tools = kTools) {
  for (std::size_t size = 1; size <= text.size() + 1; ++size) {
    const auto found = parsed(format, text, size, tools);
    ASSERT_EQ(found.content, content) << size;
    ASSERT_EQ(found.reasoning, reasoning) << size;
    ASSERT_EQ(found.calls, calls) << size << " " << found.calls.size();
  }
}

// The value that a format without quotes reads for an argument with this schema.
std::string typed(const std::string& schema, const std::string& value) {
  const auto tools = ordered_json::parse(
      R"([{"function": {"name": "f", "parameters": {"properties": {"a": )" + schema + "}}}}]");
  const auto found = parsed(ToolFormat::kMiniMaxM2,
                            "<minimax:tool_call><invoke name=\"f\"><parameter name=\"a\">" + value +
                                "</parameter></invoke></minimax:tool_call>",
                            1000, tools);
  return found.calls.empty() ? "no call"
                             : ordered_json::parse(found.calls[0].arguments)["a"].dump();
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

TEST(ToolCalls, AQuoteInTagsIsOneCharacterOfAValue) {
  expect(ToolFormat::kHermes,
         "<tool_call><function=f><parameter=s>5\"</parameter></function></tool_call>"
         "<tool_call><function=g><parameter=s>6\"</parameter></function></tool_call>",
         "", {{"f", R"({"s":"5\""})"}, {"g", R"({"s":"6\""})"}});
}

TEST(ToolCalls, GlmWritesKeysAndValues) {
  expect(ToolFormat::kHermes,
         "\n<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>12</arg_value>\n<arg_key>n</"
         "arg_key>\n<arg_value>12</arg_value>\n"
         "<arg_key>other</arg_key>\n<arg_value>[1, "
         "\"x\"]</arg_value>\n</tool_call>\n<tool_call>f\n</tool_call>",
         "", {{"f", R"({"s":"12","n":12,"other":[1,"x"]})"}, {"f", "{}"}});
}

TEST(ToolCalls, Llama3IsACallOrText) {
  expect(
      ToolFormat::kLlama3Json,
      R"(<|python_tag|>{"name": "f", "parameters": {"s": "a;b"}}; {"name": "g", "parameters": {}})",
      "", {{"f", R"({"s":"a;b"})"}, {"g", "{}"}});
  expect(ToolFormat::kLlama3Json, "It is {\"name\": \"f\"}.", "It is {\"name\": \"f\"}.", {});
  expect(ToolFormat::kLlama3Json, "{\"name\": 3}", "{\"name\": 3}", {});
}

TEST(ToolCalls, ANameWithoutArgumentsIsNoCall) {
  const std::string person = R"({"name": "Bob", "age": 3})";
  expect(ToolFormat::kLlama3Json, person, person, {});
  expect(ToolFormat::kLlama3Json, "<|python_tag|>" + person, "<|python_tag|>" + person, {});
  const auto tagged = "<tool_call>" + person + "</tool_call>";
  expect(ToolFormat::kHermes, tagged, tagged, {});
}

TEST(ToolCalls, Llama3MayWriteTextAroundItsObjects) {
  const std::string call = R"({"name": "f", "parameters": {"s": "}{\""}})";
  const std::vector<ToolCall> one{{"f", R"({"s":"}{\""})"}}, two{one[0], one[0]};
  expect(ToolFormat::kLlama3Json, "Sure: " + call, "Sure:", one);
  expect(ToolFormat::kLlama3Json, "Sure: <|python_tag|>" + call + "\n", "Sure:", one);
  expect(ToolFormat::kLlama3Json, call + " ok?", " ok?", one);
  expect(ToolFormat::kLlama3Json, call + "\n" + call, "", two);
  expect(ToolFormat::kLlama3Json, call + ";<|python_tag|>" + call + " ; ", "", two);
  expect(ToolFormat::kLlama3Json, "[" + call + "]", "[]", one);
  expect(ToolFormat::kLlama3Json, "{x} {\"a\" {" + call, "{x} {\"a\" {", one);
  expect(ToolFormat::kLlama3Json, "{\"a\": " + call, "{\"a\":", one);
  for (const auto& text :
       {"{\"a\": " + call + "}", std::string("{\"name\": \"f\", \"parameters\": {\"s\": 1}"),
        std::string(" {\"a\": [1, 2.5e3, true, null, [], {}]} ; \n"),
        std::string("<|python_tag|>print({})\n"), std::string("a <|python_"), std::string("\n {"),
        std::string(200, '{'), std::string("{\"a\": 1,, \"b\": 2}")})
    expect(ToolFormat::kLlama3Json, text, text, {});
}

TEST(ToolCalls, ManyBracesAreReadInLittleTime) {
  for (const std::string unit : {"{\"a\":", "{\"{\":", "{\"a\":\"{\",", "{\"", "{", "[{"}) {
    std::string text;
    while (text.size() < 200'000) text += unit;
    ToolCallParser parser(ToolFormat::kLlama3Json, kTools);
    auto content = parser.take(text).content;
    EXPECT_EQ(content += parser.finish().content, text);
  }
}

TEST(ToolCalls, WordsBetweenMarkersAreNoName) {
  const std::string text = "<tool_call>I call nobody</tool_call>";
  expect(ToolFormat::kHermes, text, text, {});
}

TEST(ToolCalls, AWholeCallAtTheEndNeedsNoMarkerBehindIt) {
  const std::vector<ToolCall> calls{{"f", R"({"s":"a"})"}};
  expect(ToolFormat::kHermes, "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"s\": \"a\"}}\n", "",
         calls);
  const std::string head = "<tool_call>\n<function=f>\n<parameter=s>\na\n",
                    end = "</parameter>\n</function>";
  expect(ToolFormat::kQwen3Coder, head + end, "", calls);
  expect(ToolFormat::kQwen3Coder, head + "</function>", "", calls);
  expect(ToolFormat::kQwen3Coder, head + "</function>\n</tool_call>", "", calls);
  expect(ToolFormat::kQwen3Coder, head + "<parameter=n>\n1\n" + end, "",
         {{"f", R"({"s":"a","n":1})"}});
  for (const auto& text : {head, head + "</parameter>\n", std::string("<tool_call>f\n")})
    expect(ToolFormat::kQwen3Coder, text, text, {});
  expect(ToolFormat::kMiniMaxM2,
         "<minimax:tool_call><invoke name=\"f\"><parameter name=\"s\">a</parameter></invoke>", "",
         calls);
}

TEST(ToolCalls, QwenCoderMayBeginWithoutItsMarker) {
  const std::string call = "<function=f>\n<parameter=s>\na\n</parameter>\n</function>";
  const ToolCall one{"f", R"({"s":"a"})"};
  expect(ToolFormat::kQwen3Coder, "Yes.\n" + call, "Yes.", {one});
  expect(ToolFormat::kQwen3Coder, call + "\n</tool_call>", "", {one});
  expect(ToolFormat::kQwen3Coder,
         call + "\n</tool_call>\n" + call + "<tool_call>" + call + "</tool_call>", "",
         {one, one, one});
  expect(ToolFormat::kQwen3Coder, call + " </tool", " </tool", {one});
  for (const std::string text : {"a <function", "<function=f> and more"})
    expect(ToolFormat::kQwen3Coder, text, text, {});
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

TEST(ToolCalls, AnEndInsideAStringIsAPartOfIt) {
  expect(ToolFormat::kHermes,
         "<tool_call>{\"name\": \"f\", \"arguments\": {\"s\": \"\\\"</tool_call>\\\\\", \"n\": \"a "
         "</tool_call> b</tool_call>\"}}</tool_call> and <tool_call>{\"name\": \"g\", "
         "\"arguments\": {}}</tool_call>",
         " and",
         {{"f", R"({"s":"\"</tool_call>\\","n":"a </tool_call> b</tool_call>"})"}, {"g", "{}"}});
  expect(ToolFormat::kKimiK2,
         "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"s\": "
         "\"<|tool_call_end|>\"}<|tool_call_end|>",
         "", {{"f", R"({"s":"<|tool_call_end|>"})", "functions.f:0"}});
}

TEST(ToolCalls, AQuoteThatIsMissingHidesNoCallBehindIt) {
  const std::string broken = "<tool_call>{\"name\": \"f}</tool_call>",
                    good = "<tool_call>{\"name\": \"g\", \"arguments\": {}}</tool_call>";
  expect(ToolFormat::kHermes, broken + good, broken, {{"g", "{}"}});
  expect(ToolFormat::kHermes, broken + broken + good, broken + broken, {{"g", "{}"}});
  const auto far = broken + std::string(70000, 'x') + good;
  ToolCallParser parser(ToolFormat::kHermes, kTools);
  const auto part = parser.take(far);
  EXPECT_EQ(part.content, broken + std::string(70000, 'x'));
  EXPECT_EQ(part.calls, (std::vector<ToolCall>{{"g", "{}"}}));
}

TEST(ToolCalls, TextKeepsItsWhiteSpace) {
  expect(ToolFormat::kHermes, " a\n\n b \n", " a\n\n b \n", {});
  expect(ToolFormat::kDeepSeekV3, "<｜tool a ", "<｜tool a ", {});
}

TEST(ToolCalls, KimiWritesIdsAndJson) {
  expect(ToolFormat::kKimiK2,
         "Look: <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
         "<|tool_call_argument_begin|>{\"s\": \"a:b\"}<|tool_call_end|>\n"
         "<|tool_call_begin|>functions.a.g:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
         "<|tool_calls_section_end|>",
         "Look:", {{"f", R"({"s":"a:b"})", "functions.f:0"}, {"a.g", "{}", "functions.a.g:1"}});
  const std::string broken =
      "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"s\": <|tool_call_end|>";
  expect(ToolFormat::kKimiK2, broken, broken, {});
}

TEST(ToolCalls, MiniMaxWritesInvokes) {
  expect(ToolFormat::kMiniMaxM2,
         "Yes.\n<minimax:tool_call>\n<invoke name=\"f\">\n<parameter name=\"s\">1</parameter>\n"
         "<parameter name=\"n\">1</parameter>\n<parameter name=\"other\">1</parameter>\n</invoke>\n"
         "<invoke name='g'></invoke>\n</minimax:tool_call>\n",
         "Yes.", {{"f", R"({"s":"1","n":1,"other":"1"})"}, {"g", "{}"}});
}

TEST(ToolCalls, SeedWritesTags) {
  expect(ToolFormat::kSeedOss,
         "<seed:tool_call>\n<function=f>\n<parameter=s>two\nlines</parameter>\n"
         "<parameter=n>2</parameter>\n</function>\n<function=g>\n</function>\n</seed:tool_call>",
         "", {{"f", R"({"s":"two\nlines","n":2})"}, {"g", "{}"}});
}

TEST(ToolCalls, DeepSeekSaysWhichArgumentsAreText) {
  const std::string invokes =
      "<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"s\" string=\"true\"> 7 "
      "</｜DSML｜parameter>\n<｜DSML｜parameter name=\"other\" string=\"false\">[7]"
      "</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name=\"g\">\n</｜DSML｜invoke>\n";
  const std::vector<ToolCall> calls{{"f", R"({"s":" 7 ","other":[7]})"}, {"g", "{}"}};
  expect(ToolFormat::kDeepSeekV32,
         "Yes.\n\n<｜DSML｜function_calls>\n" + invokes + "</｜DSML｜function_calls>", "Yes.",
         calls);
  expect(ToolFormat::kDeepSeekV4,
         "Yes.\n\n<｜DSML｜tool_calls>\n" + invokes + "</｜DSML｜tool_calls>", "Yes.", calls);
}

TEST(ToolCalls, TagsThatDoNotParseAreText) {
  for (const std::string text :
       {"<minimax:tool_call>\n<invoke name=\"f\">lost</invoke>\n</minimax:tool_call>",
        "<minimax:tool_call>\n<invoke name=\"f\"></invoke>\nlost</minimax:tool_call>",
        "<minimax:tool_call><invoke name=\"f\"><parameter name=\"s\">1</invoke>"
        "</minimax:tool_call>",
        "<minimax:tool_call><invoke title=\"f\"></invoke></minimax:tool_call>",
        "<minimax:tool_call><invoke name=\"f\">", "<minimax:tool_call></minimax:tool_call>"})
    expect(ToolFormat::kMiniMaxM2, text, text, {});
  for (const std::string text : {"<seed:tool_call>\n<function=f>\n</seed:tool_call>",
                                 "<seed:tool_call>lost<function=f></function></seed:tool_call>"})
    expect(ToolFormat::kSeedOss, text, text, {});
}

TEST(ToolCalls, ValuesWithoutQuotesHaveTheTypesOfTheirSchema) {
  EXPECT_EQ(typed(R"({"type": "string"})", "null"), R"("null")");
  EXPECT_EQ(typed(R"({"type": "string"})", "\n a \n"), R"(" a ")");
  EXPECT_EQ(typed(R"({"type": ["string", "null"]})", "None"), "null");
  EXPECT_EQ(typed(R"({"type": ["string", "null"]})", "7"), R"("7")");
  EXPECT_EQ(typed(R"({"type": ["string", "integer"]})", "7"), "7");
  EXPECT_EQ(typed(R"({"anyOf": [{"type": "string"}, {"type": "array"}]})", "[7]"), "[7]");
  EXPECT_EQ(typed(R"({"enum": ["1", "2"]})", "1"), R"("1")");
  EXPECT_EQ(typed(R"({"enum": ["1", "2"]})", R"("1")"), R"("\"1\"")");
  EXPECT_EQ(typed(R"({"anyOf": [{"type": "string"}, {"type": "null"}]})", R"("a")"), R"("\"a\"")");
  EXPECT_EQ(typed(R"({"anyOf": [{"type": "string"}, {"type": "null"}]})", "null"), "null");
  EXPECT_EQ(typed(R"({"type": ["string", "integer"]})", R"("a")"), R"("a")");
  EXPECT_EQ(typed(R"({"type": "boolean"})", "True"), "true");
  EXPECT_EQ(typed(R"({"type": "boolean"})", "0"), "false");
  EXPECT_EQ(typed(R"({"type": "integer"})", "seven"), R"("seven")");
  EXPECT_EQ(typed(R"({"type": "number"})", " 1.5\n"), "1.5");
  EXPECT_EQ(typed(R"({"type": "object"})", R"({"b": [1]})"), R"({"b":[1]})");
  EXPECT_EQ(typed("{}", "7"), "7");
}

// Python's json has integers of any size.
TEST(ToolCalls, AnIntegerKeepsItsDigits) {
  const std::string digits = "123456789012345678901234567890";
  const std::string arguments = "{\"n\":" + digits + "}";
  const std::vector<ToolCall> calls{{"f", arguments}};
  expect(ToolFormat::kHermes,
         "<tool_call>{\"name\": \"f\", \"arguments\": " + arguments + "}</tool_call>", "", calls);
  expect(ToolFormat::kHermes,
         "<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"n\\\": " + digits + "}\"}</tool_call>",
         "", calls);
  expect(ToolFormat::kQwen3Coder,
         "<tool_call>\n<function=f>\n<parameter=n>\n" + digits +
             "\n</parameter>\n</function>\n</tool_call>",
         "", calls);
  expect(ToolFormat::kMiniMaxM2,
         "<minimax:tool_call><invoke name=\"f\"><parameter name=\"n\">" + digits +
             "</parameter></invoke></minimax:tool_call>",
         "", calls);
  expect(ToolFormat::kLlama3Json, "{\"name\": \"f\", \"parameters\": " + arguments + "}", "",
         calls);
  expect(
      ToolFormat::kKimiK2,
      "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>" +
          arguments + "<|tool_call_end|><|tool_calls_section_end|>",
      "", {{"f", arguments, "functions.f:0"}});
}

TEST(ToolCalls, ListsOfObjectsFollowAMarker) {
  const std::string two =
      R"([{"name": "f", "arguments": {"s": "]", "n": 1}}, {"name": "g", "arguments": {}}])";
  const std::vector<ToolCall> calls{{"f", R"({"s":"]","n":1})"}, {"g", "{}"}};
  for (const auto& [format, begin, end] :
       {std::tuple{ToolFormat::kGranite, "<|tool_call|>", ""},
        std::tuple{ToolFormat::kGranite, "<tool_call>", ""},
        std::tuple{ToolFormat::kPhi4Mini, "functools", ""},
        std::tuple{ToolFormat::kHunyuan, "<tool_calls>", "</tool_calls>"},
        std::tuple{ToolFormat::kHunyuan, "<tool_calls>\n", "\n</tool_calls>"},
        std::tuple{ToolFormat::kMistral, "[TOOL_CALLS] ", ""}}) {
    expect(format, begin + two + end, "", calls);
    expect(format, "So:\n" + (begin + two) + end + "\n", "So:", calls);
    for (const std::string text : {"[]", "[{\"name\": \"f\"}]", "[{\"name\": ", "x", "[1"})
      expect(format, "a " + (begin + text) + end, "a " + (begin + text) + end, {});
  }
}

TEST(ToolCalls, MistralMayWriteNamesInFrontOfArguments) {
  const std::vector<ToolCall> calls{{"f", R"({"s":"}[TOOL_CALLS]"})"}, {"g", "{}"}};
  expect(ToolFormat::kMistral,
         "Well.[TOOL_CALLS]f[ARGS]{\"s\": \"}[TOOL_CALLS]\"}[TOOL_CALLS]g[CALL_ID]abc[ARGS]{}",
         "Well.", calls);
  expect(ToolFormat::kMistral, "[TOOL_CALLS]f{\"s\": \"}[TOOL_CALLS]\"}[TOOL_CALLS] g {}", "",
         calls);
  for (const std::string text :
       {"[TOOL_CALLS]", "[TOOL_CALLS]f", "[TOOL_CALLS]f[ARGS]", "[TOOL_CALLS]f[ARGS]{\"s\"",
        "[TOOL_CALLS]f[X]{}", "[TOOL_CALLS]{}"})
    expect(ToolFormat::kMistral, text, text, {});
}

// The examples of vLLM's tests of these parsers have such calls.
TEST(ToolCalls, PythonWritesCalls) {
  const std::string calls =
      "get_weather(city='San Francisco', metric=\"celsius\"), "
      "register(age=37, address={'city': \"LA\"}, role=None, passed=true, aliases=['J', ]), now()";
  const std::vector<ToolCall> found{
      {"get_weather", R"({"city":"San Francisco","metric":"celsius"})"},
      {"register",
       R"({"age":37,"address":{"city":"LA"},"role":null,"passed":true,"aliases":["J"]})"},
      {"now", "{}"}};
  expect(ToolFormat::kPythonic, "[" + calls + "]", "", found);
  expect(ToolFormat::kPythonic, "\n<|python_start|>[" + calls + "]<|python_end|>\n", "", found);
  expect(ToolFormat::kOlmo3, "<function_calls>\n" + calls + "\n</function_calls>", "", found);
  expect(ToolFormat::kOlmo3, "So. <function_calls>f(n=1)\ng(s='(')</function_calls>", "So.",
         {{"f", R"({"n":1})"}, {"g", R"({"s":"("})"}});
  for (const std::string text :
       {"[f(1)]", "[f(n=1)", "[]", "[1, 2]", "a [f()]", "[f(n=g())] x", "\n[see", "<|python", " "})
    expect(ToolFormat::kPythonic, text, text, {});
  expect(ToolFormat::kOlmo3, "<function_calls>no</function_calls>",
         "<function_calls>no</function_calls>", {});
}

TEST(ToolCalls, GemmaQuotesByTokens) {
  const std::vector<ToolCall> calls{
      {"f-x.y", R"({"s":"a}, \"b\": [","n":42,"l":["c",1.5,{"k":true}],"z":null,"w":"bare"})"},
      {"g", "{}"}};
  const std::string body = "call:f-x.y{s:Qa}, \"b\": [Q,n:42,l:[QcQ,1.5,{QkQ:true}],z:null,w:bare}";
  for (const auto& [format, begin, end, quote] :
       {std::tuple{ToolFormat::kGemma4, "<|tool_call>", "<tool_call|>", "<|\"|>"},
        std::tuple{ToolFormat::kFunctionGemma, "<start_function_call>", "<end_function_call>",
                   "<escape>"}}) {
    std::string text = body;
    for (auto at = text.find('Q'); at != text.npos; at = text.find('Q', at))
      text.replace(at, 1, quote);
    expect(format, "So." + (begin + text) + end + begin + "call:g{}" + end, "So.", calls);
    for (const std::string none : {"f{}", "call:f", "call:{}", "call:f{a:1", "call:f{,}"})
      expect(format, begin + none + end, begin + none + end, {});
  }
}

TEST(ToolCalls, GptOssHasChannels) {
  expect(ToolFormat::kOpenAi,
         "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>final<|message|>"
         " It is 3 <|x|>.\n<|return|>",
         " It is 3 <|x|>.\n", {}, "Think.");
  expect(ToolFormat::kOpenAi,
         "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>"
         "Two.<|end|><|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>"
         "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
         "{\"s\": \"a\"}<|call|>"
         "<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}",
         "Let me see.", {{"f", R"({"s":"a"})"}, {"g", "{}"}}, "One.\nTwo.");
  expect(ToolFormat::kOpenAi, " to=functions.f<|channel|>analysis<|message|>{}<|call|>", "",
         {{"f", "{}"}});
}

TEST(ToolCalls, TextOfGptOssThatIsNoMessageIsContent) {
  for (const std::string text :
       {"{\"free\": 1}", " <|chan", "to", "to=functions.f<|channel|>commentary",
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"s\": <|call|>",
        "<|channel|>commentary to=functions.f json<|message|>{\"s\"",
        "<|channel|>commentary to=browser.open<|message|>{}<|call|>",
        "<|channel|>own<|message|>text<|end|>", "<|channel|>final<|end|>"})
    expect(ToolFormat::kOpenAi, text, text, {});
  expect(ToolFormat::kOpenAi,
         "<|channel|>analysis<|message|>So<|start|>assistant<|channel|>final<|message|>Yes", "Yes",
         {}, "So");
}

TEST(ToolCalls, GptOssHasNoCallsWithoutTools) {
  const std::string call = "<|channel|>commentary to=functions.f json<|message|>{}<|call|>";
  expect(ToolFormat::kOpenAi, "<|channel|>analysis<|message|>So.<|end|><|start|>assistant" + call,
         "<|start|>assistant" + call, {}, "So.", ordered_json());
}

TEST(Harmony, NamesReasoningAsTheTemplateDoes) {
  auto messages = ordered_json::parse(
      R"([{"role": "user", "content": "a"},
          {"role": "assistant", "content": "b", "reasoning_content": "c"},
          {"role": "assistant", "content": "d", "reasoning_content": "e", "tool_calls": [{}]},
          {"role": "assistant", "content": "f", "reasoning_content": "", "tool_calls": [{}]}])");
  name_thinking(messages);
  EXPECT_FALSE(messages[0].contains("thinking"));
  EXPECT_EQ(messages[1]["thinking"], "c");
  EXPECT_EQ(messages[1]["content"], "b");
  EXPECT_EQ(messages[2]["thinking"], "e");
  EXPECT_EQ(messages[2]["content"], "");
  EXPECT_EQ(messages[3]["content"], "f");
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
  EXPECT_EQ(tool_format_of_template("{{ '<|tool_calls_section_begin|>' }}"), ToolFormat::kKimiK2);
  EXPECT_EQ(tool_format_of_template("{{ '<minimax:tool_call>' }}"), ToolFormat::kMiniMaxM2);
  EXPECT_EQ(tool_format_of_template("{{ '<seed:tool_call><function=' }}"), ToolFormat::kSeedOss);
  EXPECT_EQ(tool_format_of_template("{% set d = '｜DSML｜' %}<{{ d }}function_calls>"),
            ToolFormat::kDeepSeekV32);
  EXPECT_EQ(tool_format_of_template("{% set d = '｜DSML｜' %}<{{ d }}tool_calls>"),
            ToolFormat::kDeepSeekV4);
  EXPECT_EQ(tool_format_of_template("{{ '<|channel|>commentary json<|message|><|call|>' }}"),
            ToolFormat::kOpenAi);
  EXPECT_EQ(tool_format_of_template("{{ '<|tool_call|>' }}"), ToolFormat::kGranite);
  EXPECT_EQ(tool_format_of_template("{{ '[TOOL_CALLS]' }}"), ToolFormat::kMistral);
  EXPECT_EQ(tool_format_of_template("{{ 'functools[' }}"), ToolFormat::kPhi4Mini);
  EXPECT_EQ(tool_format_of_template("{{ '<tool_calls>' }}"), ToolFormat::kHunyuan);
  EXPECT_EQ(tool_format_of_template("{{ '<function_calls>' }}"), ToolFormat::kOlmo3);
  EXPECT_EQ(tool_format_of_template("{{ '<|tool_call>' }}"), ToolFormat::kGemma4);
  EXPECT_EQ(tool_format_of_template("{{ '<start_function_call>' }}"), ToolFormat::kFunctionGemma);
  EXPECT_EQ(tool_format_of_template("{{ messages }}"), std::nullopt);
}

}  // namespace tool_calls_test
}  // namespace ferry::rollout::text
