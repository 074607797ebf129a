#include "serve/api/structured_outputs.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "rollout/grammar/format.h"
#include "rollout/grammar/program.h"
#include "rollout/text/shallow_json.h"
#include "serve/api/answer_format.h"
#include "serve/api/tagged_arguments.h"

namespace ferry::serve {

using rollout::text::ToolFormat;
namespace {

constexpr const char* kTools = "tools";  // the field that has calls

// A schema, or its JSON text.
ordered_json schema_of(const Fields& fields, const char* name) {
  const auto& given = *fields.find(name);
  if (!given.is_string()) return schema_format(given);
  auto schema = rollout::text::parse_shallow_json(given.get<std::string>());
  if (schema.is_discarded()) fields.refuse(name, "is no JSON, or nested too deep");
  return schema_format(schema);
}

ordered_json choice_of(const Fields& fields, const char* name) {
  std::vector<std::string> texts;
  fields.read_strings(name, texts);
  if (texts.empty()) fields.refuse(name, "is empty");
  auto ways = ordered_json::array();
  for (const auto& text : texts) ways.push_back(text_format(text));
  return list_format("or", std::move(ways));
}

ordered_json regex_of(const Fields& fields, const char* name) {
  std::string pattern;
  fields.read(name, pattern);
  return {{"type", "regex"}, {"pattern", pattern}};
}

ordered_json any_object() {
  return schema_format({{"type", "object"}});
}

ordered_json of_response_format(const Fields& of_format) {
  std::string type = "text";
  of_format.read("type", type);
  if (type == "text") return nullptr;
  if (type == "json_object") return any_object();
  if (type != "json_schema")
    of_format.refuse("type", "is not \"text\", \"json_object\" or \"json_schema\"");
  if (!of_format.has("json_schema")) of_format.refuse("json_schema", "is missing");
  const Fields of_schema(*of_format.find("json_schema"), "response_format.json_schema.");
  if (!of_schema.has("schema")) of_schema.refuse("schema", "is missing");
  return schema_of(of_schema, "schema");
}

// vLLM's StructuredOutputsParams.
ordered_json of_structured_outputs(const Fields& fields, const ordered_json& object) {
  ordered_json found;
  for (const auto& [key, value] : object.items()) {
    if (value.is_null() || value == false) continue;
    if (key != "json" && key != "regex" && key != "choice" && key != "json_object")
      fields.refuse(key, "is not supported");
    if (!found.is_null()) fields.refuse(key, "is not the only constraint");
    if (key == "json") found = schema_of(fields, "json");
    if (key == "regex") found = regex_of(fields, "regex");
    if (key == "choice") found = choice_of(fields, "choice");
    if (key == "json_object") found = any_object();
  }
  return found;
}

// ---- calls -------------------------------------------------------------------------------------

// The schema of a tool's arguments, which are an object.
ordered_json parameters_of(const ordered_json& function) {
  auto schema = function.value("parameters", ordered_json());
  if (schema.is_null()) return {{"type", "object"}, {"additionalProperties", false}};
  if (schema.is_object() && !schema.contains("type")) schema["type"] = "object";
  return schema;
}

struct CallFormat {
  std::string begin{};      // of all calls
  std::string separator{};  // between two
  std::string end{};
};

CallFormat frame_of(ToolFormat format) {
  switch (format) {
    case ToolFormat::kLlama3Json:
      return {.separator = "; "};
    case ToolFormat::kDeepSeekV3:
      return {.begin = "<｜tool▁calls▁begin｜>", .separator = "\n", .end = "<｜tool▁calls▁end｜>"};
    case ToolFormat::kDeepSeekV31:
      return {.begin = "<｜tool▁calls▁begin｜>", .end = "<｜tool▁calls▁end｜>"};
    case ToolFormat::kDeepSeekV32:
    case ToolFormat::kDeepSeekV4:
    case ToolFormat::kMiniMaxM2: {
      const auto markers = rollout::text::markers_of(format);
      return {.begin = std::string(markers.begin) + "\n",
              .separator = "\n",
              .end = "\n" + std::string(markers.end)};
    }
    case ToolFormat::kKimiK2:
      return {.begin = "<|tool_calls_section_begin|>", .end = "<|tool_calls_section_end|>"};
    case ToolFormat::kGranite:
    case ToolFormat::kPhi4Mini:
    case ToolFormat::kHunyuan:
    case ToolFormat::kMistral: {
      const auto markers = rollout::text::markers_of(format);
      return {.begin = std::string(markers.begin) + "[",
              .separator = ", ",
              .end = "]" + std::string(markers.end)};
    }
    case ToolFormat::kHermes:
    case ToolFormat::kQwen3Coder:
    case ToolFormat::kGlm45:
    case ToolFormat::kSeedOss:
    case ToolFormat::kPythonic:
    case ToolFormat::kOlmo3:
    case ToolFormat::kGemma4:
    case ToolFormat::kFunctionGemma:
    case ToolFormat::kOpenAi:
      break;
  }
  return {.separator = "\n"};
}

ordered_json format_of_call(ToolFormat format, const ordered_json& function) {
  const auto name = function.at("name").get<std::string>();
  const auto quoted = dump(name);
  const auto schema = parameters_of(function);
  const auto around = [&](const std::string& begin, ordered_json arguments,
                          const std::string& end) {
    return sequence_of({text_format(begin), std::move(arguments), text_format(end)});
  };
  const auto tagged = [&](const std::string& begin, const std::string& end,
                          const ArgumentTags& tags) {
    const auto frame = frame_of(format);
    const TaggedCall call{
        .format = format, .tool = name, .begin = frame.begin + begin, .end = end + frame.end};
    return around(begin, tagged_arguments(call, schema, tags), end);
  };
  switch (format) {
    case ToolFormat::kLlama3Json:
      return around(fmt::format("{{\"name\": {}, \"parameters\": ", quoted), schema_format(schema),
                    "}");
    case ToolFormat::kDeepSeekV3:
      return around("<｜tool▁call▁begin｜>function<｜tool▁sep｜>" + name + "\n```json\n",
                    schema_format(schema), "\n```<｜tool▁call▁end｜>");
    case ToolFormat::kDeepSeekV31:
      return around("<｜tool▁call▁begin｜>" + name + "<｜tool▁sep｜>", schema_format(schema),
                    "<｜tool▁call▁end｜>");
    case ToolFormat::kQwen3Coder:
      return tagged("<tool_call>\n<function=" + name + ">\n", "</function>\n</tool_call>",
                    {"<parameter=", ">\n", "\n</parameter>\n"});
    case ToolFormat::kSeedOss:
      return tagged("<seed:tool_call>\n<function=" + name + ">\n", "</function>\n</seed:tool_call>",
                    {"<parameter=", ">", "</parameter>\n"});
    case ToolFormat::kMiniMaxM2:
      return tagged("<invoke name=\"" + name + "\">\n", "</invoke>",
                    {"<parameter name=\"", "\">", "</parameter>\n"});
    case ToolFormat::kDeepSeekV32:
    case ToolFormat::kDeepSeekV4:
      return tagged("<｜DSML｜invoke name=\"" + name + "\">\n", "</｜DSML｜invoke>",
                    {.begin = "<｜DSML｜parameter name=\"",
                     .between = "\" string=\"true\">",
                     .end = "</｜DSML｜parameter>\n",
                     .between_json = "\" string=\"false\">"});
    case ToolFormat::kKimiK2:
      return sequence_of({text_format("<|tool_call_begin|>functions." + name + ":"),
                          {{"type", "regex"}, {"pattern", "[0-9]{1,3}"}},
                          text_format("<|tool_call_argument_begin|>"),
                          schema_format(schema),
                          text_format("<|tool_call_end|>")});
    case ToolFormat::kOpenAi:
      return around("<|channel|>commentary to=functions." + name + " <|constrain|>json<|message|>",
                    schema_format(schema), "");
    case ToolFormat::kGlm45:
      return tagged("<tool_call>" + name + "\n", "</tool_call>",
                    {"<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"});
    case ToolFormat::kGranite:
    case ToolFormat::kPhi4Mini:
    case ToolFormat::kHunyuan:
    case ToolFormat::kMistral:
      return around(fmt::format("{{\"name\": {}, \"arguments\": ", quoted), schema_format(schema),
                    "}");
    case ToolFormat::kPythonic:
    case ToolFormat::kOlmo3:
    case ToolFormat::kGemma4:
    case ToolFormat::kFunctionGemma:
      throw ApiError(400,
                     "tool_choice: asks for a call, which this model's format of calls cannot "
                     "be held to",
                     "tool_choice");
    case ToolFormat::kHermes:
      break;
  }
  return around(fmt::format("<tool_call>\n{{\"name\": {}, \"arguments\": ", quoted),
                schema_format(schema), "}\n</tool_call>");
}

// ---- thoughts before an answer ------------------------------------------------------------------

ordered_json optional_format(ordered_json content) {
  return {{"type", "optional"}, {"content", std::move(content)}};
}

ordered_json any_text_up_to(std::string_view end) {
  return sequence_of({{{"type", "any_text"}, {"exclude", end}}, text_format(std::string(end))});
}

// GPT-OSS may reason on a channel of its own; calls name theirs.
ordered_json behind_analysis(ordered_json format, bool is_call) {
  auto reasoning = sequence_of({text_format("<|channel|>analysis<|message|>"),
                                any_text_up_to("<|end|>"), text_format("<|start|>assistant")});
  if (!is_call)
    format = sequence_of({text_format("<|channel|>final<|message|>"), std::move(format)});
  return sequence_of({optional_format(std::move(reasoning)), std::move(format)});
}

ordered_json behind_thoughts(ordered_json format, const rollout::text::Thoughts& thoughts) {
  const auto begin = text_format(std::string(thoughts.format.begin));
  const auto rest = any_text_up_to(thoughts.format.end);
  if (thoughts.are_certain) return sequence_of({optional_format(begin), rest, std::move(format)});
  return sequence_of({optional_format(sequence_of({begin, rest})), std::move(format)});
}

// ---- what ends an answer -----------------------------------------------------------------------

// A token of text may be one that the format needs, and then no answer would have it; so may an
// added token that is written in the format.
bool is_of_format(const std::string& token,
                  const std::string& format,
                  const rollout::text::Tokenizer& tokenizer) {
  const auto added = tokenizer.added_tokens();
  if (std::ranges::find(added, token) == added.end()) return true;
  const auto quoted = dump(token);
  return format.find(std::string_view(quoted).substr(1, quoted.size() - 2)) != std::string::npos;
}

// An answer by a pattern may end before a stop string, as vLLM's users have it: with the string it
// is the beginning of a match. JSON that is cut off would be none.
void refuse_early_ends(const RequestedFormat& requested,
                       const std::string& format,
                       const rollout::text::Tokenizer& tokenizer,
                       const GenerationRequest& request) {
  const auto refuse = [&](const char* field, const std::string& why = "") {
    throw ApiError(
        400, fmt::format("{}: {}is not supported beside {}", field, why, requested.param), field);
  };
  if (requested.format["type"] != "regex") {
    if (!request.params.stop.empty()) refuse("stop");
    if (request.include_stop_str_in_output) refuse("include_stop_str_in_output");
  }
  for (const auto id : request.params.stop_token_ids) {
    const auto token = tokenizer.id_to_token(static_cast<rollout::text::TokenId>(id));
    if (token && is_of_format(*token, format, tokenizer))
      refuse("stop_token_ids", fmt::format("{}, which the format may need, ", id));
  }
}

}  // namespace

std::optional<RequestedFormat> requested_format(const Fields& fields) {
  std::optional<RequestedFormat> found;
  const auto add = [&](const char* name, ordered_json format) {
    if (format.is_null()) return;
    if (found)
      fields.refuse(name, fmt::format("is not the only constraint: {} is another", found->param));
    found = RequestedFormat{.param = name, .format = std::move(format)};
  };
  if (const auto* const format = fields.find("response_format"))
    add("response_format", of_response_format(Fields(*format, "response_format.")));
  if (const auto* const object = fields.find("structured_outputs"))
    add("structured_outputs",
        of_structured_outputs(Fields(*object, "structured_outputs."), *object));
  if (fields.has("guided_json")) add("guided_json", schema_of(fields, "guided_json"));
  if (fields.has("guided_regex")) add("guided_regex", regex_of(fields, "guided_regex"));
  if (fields.has("guided_choice")) add("guided_choice", choice_of(fields, "guided_choice"));
  return found;
}

RequestedFormat format_of_calls(ToolFormat format,
                                const ordered_json& tools,
                                const std::string& name,
                                bool is_parallel) {
  auto ways = ordered_json::array();
  for (const auto& tool : tools) {
    const auto function =
        tool.is_object() ? tool.value("function", ordered_json()) : ordered_json();
    const auto given =
        function.is_object() ? function.value("name", ordered_json()) : ordered_json();
    if (!given.is_string()) throw ApiError(400, "tools: a function has no name", kTools);
    if (name.empty() || given == name) ways.push_back(format_of_call(format, function));
  }
  if (ways.empty())
    throw ApiError(400, fmt::format("tool_choice: {} is not one of the tools", name),
                   "tool_choice");
  const auto frame = frame_of(format);
  const auto call = list_format("or", std::move(ways));
  if (has_channels(format)) return {.param = kTools, .format = call};  // <|call|> ends the answer
  std::vector<ordered_json> parts{text_format(frame.begin), call};
  if (is_parallel)
    parts.push_back(
        {{"type", "star"}, {"content", sequence_of({text_format(frame.separator), call})}});
  parts.push_back(text_format(frame.end));
  return {.param = kTools, .format = sequence_of(std::move(parts))};
}

void hold_to(const RequestedFormat& requested,
             const ServedModel& model,
             GenerationRequest& request) {
  const auto& tokenizer = model.require_tokenizer(requested.param);
  auto format = requested.format;
  if (request.is_chat && model.has_channels())
    format = behind_analysis(std::move(format), /*is_call=*/requested.param == kTools);
  if (request.thoughts) format = behind_thoughts(std::move(format), *request.thoughts);
  auto text = rollout::text::json_text(format);
  try {
    rollout::grammar::make_program(rollout::grammar::read_format(text, tokenizer));
  } catch (const Error& error) {
    throw ApiError(400, fmt::format("{}: {}", requested.param, error.what()), requested.param);
  }
  refuse_early_ends(requested, text, tokenizer, request);
  request.params.structured_outputs = std::move(text);
}

}  // namespace ferry::serve
