// The formats that requests ask for, and those of tools' calls.
#include "serve/api/structured_outputs.h"

#include <gtest/gtest.h>

#include <array>
#include <string>

namespace ferry::serve {
namespace structured_outputs_test {

using rollout::text::ToolFormat;

std::optional<RequestedFormat> requested(const char* text) {
  const auto request = ordered_json::parse(text);
  return requested_format(Fields(request));
}

// The message of the ApiError that a request gets.
std::string refusal(const char* request) {
  try {
    (void)requested(request);
  } catch (const ApiError& error) {
    EXPECT_EQ(error.status(), 400);
    return error.what();
  }
  return "is accepted";
}

bool holds(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

ordered_json tools() {
  return ordered_json::parse(R"([
      {"type": "function", "function": {"name": "weather", "parameters": {
          "type": "object",
          "properties": {"city": {"type": "string"},
                         "unit": {"type": "string", "enum": ["C", "F"]},
                         "days": {"type": "integer"}},
          "required": ["city"]}}},
      {"type": "function", "function": {"name": "time"}}])");
}

// All texts of a format, in its order.
void gather_texts(const ordered_json& format, std::string& texts) {
  if (format.is_object() && format.value("type", "") == "const_string")
    texts += format["value"].get<std::string>();
  if (format.is_structured())
    for (const auto& part : format) gather_texts(part, texts);
}

std::string texts_of(ToolFormat format, const std::string& name) {
  std::string texts;
  gather_texts(format_of_calls(format, tools(), name, /*is_parallel=*/false).format, texts);
  return texts;
}

TEST(RequestedFormat, IsAbsentWhereTheAnswerIsFree) {
  EXPECT_FALSE(requested(R"({"prompt": "a"})"));
  EXPECT_FALSE(requested(R"({"response_format": {"type": "text"}})"));
  EXPECT_FALSE(requested(R"({"structured_outputs": {"json": null, "json_object": false}})"));
}

TEST(RequestedFormat, TakesASchemaAsAnObjectOrItsText) {
  const auto format = ordered_json::parse(
      R"({"type": "json_schema", "json_schema": {"type": "integer"}, "at": ""})");
  const auto object = requested(R"({"guided_json": {"type": "integer"}})");
  const auto text = requested(R"({"guided_json": "{\"type\": \"integer\"}"})");
  ASSERT_TRUE(object && text);
  EXPECT_EQ(object->format, format);
  EXPECT_EQ(text->format, format);
  EXPECT_EQ(object->param, "guided_json");
}

TEST(RequestedFormat, OfOpenAiIsTheSchemaInside) {
  const auto found = requested(
      R"({"response_format": {"type": "json_schema",
                              "json_schema": {"schema": {"type": "null"}}}})");
  ASSERT_TRUE(found);
  EXPECT_EQ(found->format["json_schema"]["type"], "null");
}

TEST(RequestedFormat, OfChoicesIsOneOfTheTexts) {
  const auto found = requested(R"({"structured_outputs": {"choice": ["yes", "no"]}})");
  ASSERT_TRUE(found);
  std::string texts;
  gather_texts(found->format, texts);
  EXPECT_EQ(found->format["type"], "or");
  EXPECT_EQ(texts, "yesno");
}

TEST(RequestedFormat, RefusesASecondConstraint) {
  EXPECT_TRUE(holds(refusal(R"({"response_format": {"type": "json_object"}, "guided_regex": "a"})"),
                    "guided_regex: is not the only constraint: response_format is another"));
  EXPECT_TRUE(holds(refusal(R"({"structured_outputs": {"regex": "a", "json_object": true}})"),
                    "structured_outputs.json_object: is not the only constraint"));
}

TEST(RequestedFormat, NamesAnOptionThatIsNoConstraint) {
  for (const char* key : {"disable_any_whitespace", "whitespace_pattern"})
    EXPECT_EQ(
        refusal((R"({"structured_outputs": {"json": {}, ")" + std::string(key) + R"(": "a"}})")
                    .c_str()),
        std::string("structured_outputs.") + key + ": is not supported");
  EXPECT_TRUE(
      requested(R"({"structured_outputs": {"json": {}, "disable_any_whitespace": false}})"));
}

TEST(RequestedFormat, NamesTheFieldThatIsNotSupported) {
  EXPECT_TRUE(holds(refusal(R"({"structured_outputs": {"grammar": "root ::= a"}})"),
                    "structured_outputs.grammar: is not supported"));
  EXPECT_TRUE(
      holds(refusal(R"({"response_format": {"type": "xml"}})"), "response_format.type: is not"));
  EXPECT_TRUE(holds(refusal(R"({"response_format": {"type": "json_schema"}})"),
                    "response_format.json_schema: is missing"));
  EXPECT_TRUE(holds(refusal(R"({"guided_json": "{"})"), "guided_json: is no JSON"));
  EXPECT_TRUE(holds(refusal(R"({"guided_choice": []})"), "guided_choice: is empty"));
}

TEST(FormatOfCalls, QuotesNamesAsTheFamilyWritesThem) {
  EXPECT_EQ(texts_of(ToolFormat::kHermes, "time"),
            "<tool_call>\n{\"name\": \"time\", \"arguments\": }\n</tool_call>");
  EXPECT_EQ(texts_of(ToolFormat::kLlama3Json, "time"), "{\"name\": \"time\", \"parameters\": }");
}

TEST(FormatOfCalls, WritesTaggedArgumentsInTheSchemasOrder) {
  EXPECT_EQ(texts_of(ToolFormat::kQwen3Coder, "weather"),
            "<tool_call>\n<function=weather>\n<parameter=city>\n\n</parameter>\n"
            "<parameter=unit>\nCF\n</parameter>\n<parameter=days>\n\n</parameter>\n"
            "</function>\n</tool_call>");
}

TEST(FormatOfCalls, WritesFramesIdsAndTypes) {
  EXPECT_EQ(texts_of(ToolFormat::kKimiK2, "time"),
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.time:"
            "<|tool_call_argument_begin|><|tool_call_end|><|tool_calls_section_end|>");
  EXPECT_EQ(
      texts_of(ToolFormat::kMiniMaxM2, "weather"),
      "<minimax:tool_call>\n<invoke name=\"weather\">\n<parameter name=\"city\"></parameter>\n"
      "<parameter name=\"unit\">CF</parameter>\n<parameter name=\"days\"></parameter>\n"
      "</invoke>\n</minimax:tool_call>");
  EXPECT_EQ(texts_of(ToolFormat::kSeedOss, "time"),
            "<seed:tool_call>\n<function=time>\n</function>\n</seed:tool_call>");
  const auto deepseek = texts_of(ToolFormat::kDeepSeekV32, "weather");
  EXPECT_TRUE(holds(deepseek, "parameter name=\"city\" string=\"true\">")) << deepseek;
  EXPECT_TRUE(holds(deepseek, "parameter name=\"days\" string=\"false\">")) << deepseek;
}

TEST(FormatOfCalls, WritesListsBehindAMarker) {
  const std::string call = "[{\"name\": \"time\", \"arguments\": }]";
  EXPECT_EQ(texts_of(ToolFormat::kMistral, "time"), "[TOOL_CALLS]" + call);
  EXPECT_EQ(texts_of(ToolFormat::kGranite, "time"), "<|tool_call|>" + call);
  EXPECT_EQ(texts_of(ToolFormat::kHunyuan, "time"), "<tool_calls>" + call + "</tool_calls>");
}

TEST(FormatOfCalls, RefusesFormatsThatAreNoJson) {
  for (const auto format : {ToolFormat::kPythonic, ToolFormat::kOlmo3, ToolFormat::kGemma4}) try {
      (void)format_of_calls(format, tools(), "time", false);
      ADD_FAILURE();
    } catch (const ApiError& error) {
      EXPECT_EQ(error.status(), 400);
    }
}

// The texts of the format that answers of a chat are held to.
std::string held_texts(std::optional<ToolFormat> calls,
                       const RequestedFormat& requested,
                       const std::optional<rollout::text::Thoughts>& thoughts = {}) {
  const rollout::text::Tokenizer tokenizer(
      R"({"added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}})", "a");
  const ServedModel model{.tokenizer = &tokenizer, .tool_format = calls};
  GenerationRequest request{.is_chat = true, .thoughts = thoughts};
  hold_to(requested, model, request);
  std::string texts;
  gather_texts(ordered_json::parse(request.params.structured_outputs), texts);
  return texts;
}
constexpr const char* kYes = R"({"structured_outputs": {"choice": ["yes"]}})";

TEST(HoldTo, LetsGptOssReasonAndCallOnce) {
  const auto call = format_of_calls(ToolFormat::kOpenAi, tools(), "time", /*is_parallel=*/true);
  const std::string analysis = "<|channel|>analysis<|message|><|end|><|start|>assistant";
  EXPECT_EQ(held_texts(ToolFormat::kOpenAi, call),
            analysis + "<|channel|>commentary to=functions.time <|constrain|>json<|message|>");
  EXPECT_EQ(held_texts(ToolFormat::kOpenAi, *requested(kYes)),
            analysis + "<|channel|>final<|message|>yes");
}

TEST(HoldTo, ThoughtsAreFree) {
  const auto qwen3 = find_in(rollout::text::kReasoningFormats, "qwen3").value();
  EXPECT_EQ(held_texts({}, *requested(kYes)), "yes");
  EXPECT_EQ(held_texts({}, *requested(kYes), rollout::text::Thoughts{.format = qwen3}),
            "<think></think>yes");
}

TEST(FormatOfCalls, MakesArgumentsOptionalThatAreNotRequired) {
  const auto format = format_of_calls(ToolFormat::kQwen3Coder, tools(), "weather", false).format;
  const auto text = format.dump();
  std::size_t optional = 0;
  for (auto at = text.find("\"optional\""); at != text.npos; at = text.find("\"optional\"", at + 1))
    ++optional;
  EXPECT_EQ(optional, 2U);  // unit and days, not city
}

TEST(FormatOfCalls, RepeatsACallOnlyWhereSeveralMayBeMade) {
  const auto repeats = [](bool is_parallel) {
    return holds(format_of_calls(ToolFormat::kHermes, tools(), "", is_parallel).format.dump(),
                 "\"star\"");
  };
  EXPECT_TRUE(repeats(true));
  EXPECT_FALSE(repeats(false));
}

TEST(FormatOfCalls, RefusesANameThatIsNoToolOfTheRequest) {
  try {
    (void)format_of_calls(ToolFormat::kHermes, tools(), "weathr", false);
    FAIL() << "is accepted";
  } catch (const ApiError& error) {
    EXPECT_TRUE(holds(error.what(), "tool_choice: weathr is not one of the tools"));
  }
}

constexpr std::array kTagged{ToolFormat::kQwen3Coder,  ToolFormat::kGlm45,
                             ToolFormat::kMiniMaxM2,   ToolFormat::kSeedOss,
                             ToolFormat::kDeepSeekV32, ToolFormat::kDeepSeekV4};

// The error that a tool with these parameters gets; the format's texts if there is none.
std::string of_parameters(ToolFormat format, const std::string& parameters) {
  const ordered_json given = {
      {{"type", "function"},
       {"function", {{"name", "f"}, {"parameters", ordered_json::parse(parameters)}}}}};
  try {
    std::string texts;
    gather_texts(format_of_calls(format, given, "", false).format, texts);
    return texts;
  } catch (const ApiError& error) {
    EXPECT_EQ(error.status(), 400);
    return error.what();
  }
}

TEST(FormatOfCalls, TaggedArgumentsAreThoseOfReferencesAndPartsThatUnite) {
  for (const auto format : kTagged)
    for (
        const char* parameters :
        {R"({"$ref": "#/$defs/A", "$defs": {"A": {"type": "object", "properties": {"arg": {"type": "integer"}}, "required": ["arg"]}}})",
         R"({"type": "object", "allOf": [{"properties": {"arg": {"type": "integer"}}, "required": ["arg"]}], "minProperties": 1})"})
      EXPECT_TRUE(holds(of_parameters(format, parameters), "arg")) << parameters;
}

TEST(FormatOfCalls, TaggedArgumentsRefuseWhatTheyDoNotHoldTo) {
  for (const auto format : kTagged)
    for (const std::string part :
         {R"("anyOf": [{"required": ["a"]}])", R"("oneOf": [{}])", R"("minProperties": 1)",
          R"("patternProperties": {"b": {}})", R"("propertyNames": {})", R"("required": ["b"])",
          R"("not": {})"})
      EXPECT_TRUE(holds(
          of_parameters(format, R"({"type": "object", "properties": {"a": {}}, )" + part + "}"),
          "tools: " + part.substr(1, part.find('"', 1) - 1) + " at # "))
          << part;
}

TEST(FormatOfCalls, TaggedArgumentsRefuseWhatWouldBeMisread) {
  const auto of = [](ToolFormat format, const std::string& name, const std::string& schema) {
    const ordered_json properties = {{name, ordered_json::parse(schema)}};
    return of_parameters(format,
                         ordered_json{{"type", "object"}, {"properties", properties}}.dump());
  };
  EXPECT_TRUE(
      holds(of(ToolFormat::kQwen3Coder, "a", R"({"enum": ["x</parameter>y"]})"), "tools: "));
  EXPECT_TRUE(
      holds(of(ToolFormat::kQwen3Coder, "a", R"({"type": "string", "enum": ["</tool_call>"]})"),
            "tools: \"</tool_call>\" at #/properties/a as a constant is not supported"));
  EXPECT_TRUE(holds(of(ToolFormat::kQwen3Coder, "a", R"({"const": "\n x"})"), "\n x"));
  EXPECT_TRUE(holds(of(ToolFormat::kMiniMaxM2, "a", R"({"const": "\n x"})"), "tools: "));
  EXPECT_TRUE(holds(of(ToolFormat::kGlm45, "a", R"({"type": "string", "const": "</arg_value>"})"),
                    "tools: "));
  EXPECT_TRUE(holds(
      of(ToolFormat::kQwen3Coder, "a", R"({"type": "array", "items": {"const": "</parameter>"}})"),
      "tools: const at #/properties/a/items"));
  EXPECT_TRUE(holds(
      of(ToolFormat::kQwen3Coder, "a", R"({"type": ["string", "null"], "enum": ["null", null]})"),
      "tools: \"null\" at #/properties/a as a constant"));
  EXPECT_TRUE(
      holds(of(ToolFormat::kQwen3Coder, "a>b", "{}"), "tools: properties at # \"a>b\" as a name"));
  EXPECT_TRUE(holds(of(ToolFormat::kDeepSeekV32, "c\"d", "{}"), "as a name is not supported"));
  EXPECT_TRUE(holds(of(ToolFormat::kGlm45, "e\n", "{}"), "as a name is not supported"));
}

TEST(FormatOfCalls, AStringThatMayBeNullHasNoQuotes) {
  const std::string parameters =
      R"({"properties": {"a": {"anyOf": [{"type": "string", "enum": ["x"]}, {"type": "null"}], "default": null}}})";
  EXPECT_TRUE(
      holds(of_parameters(ToolFormat::kSeedOss, parameters), "<parameter=a>xnull</parameter>"));
  EXPECT_TRUE(holds(of_parameters(ToolFormat::kDeepSeekV4, parameters), "string=\"false\">"));
}

// The reader takes a value of type "string" as it is, quotes among it.
TEST(FormatOfCalls, TaggedArgumentsRefuseAlternativesBesideTheTypeOfText) {
  for (const auto format : kTagged)
    EXPECT_TRUE(holds(
        of_parameters(
            format,
            R"({"properties": {"a": {"type": "string", "anyOf": [{"enum": ["ab", "1"]}, {"type": "number"}]}}})"),
        "tools: anyOf at #/properties/a"));
}

TEST(FormatOfCalls, RefusesPatternsOfStringsThatHaveNoQuotes) {
  auto given = tools();
  given[0]["function"]["parameters"]["properties"]["city"]["pattern"] = "a+";
  try {
    (void)format_of_calls(ToolFormat::kGlm45, given, "weather", false);
    FAIL() << "is accepted";
  } catch (const ApiError& error) {
    EXPECT_TRUE(holds(error.what(), "tools: pattern at #/properties/city is not supported"));
  }
}

}  // namespace structured_outputs_test
}  // namespace ferry::serve
