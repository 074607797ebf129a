#include <array>
#include <nlohmann/json.hpp>
#include <string>

#include "rollout/text/tool_calls.h"
#include "tests/fuzz/property.h"
#include "tests/fuzz/targets.h"

namespace ferry::fuzz {
namespace {

using nlohmann::ordered_json;
using rollout::text::ToolCallParser;
using rollout::text::ToolFormat;

ToolCallParser::Part read(ToolFormat format, std::string_view text, std::size_t step) {
  static const auto tools = ordered_json::parse(R"([{"type": "function", "function": {"name": "f",
      "parameters": {"type": "object", "properties": {"s": {"type": "string"}, "n": {"type": "integer"}}}}}])");
  ToolCallParser parser(format, tools);
  ToolCallParser::Part all;
  const auto add = [&](ToolCallParser::Part part) {
    all.content += part.content;
    all.reasoning += part.reasoning;
    all.calls.insert(all.calls.end(), part.calls.begin(), part.calls.end());
  };
  for (std::size_t at = 0; at < text.size(); at += step) add(parser.take(text.substr(at, step)));
  add(parser.finish());
  return all;
}

}  // namespace

// The first byte chooses the format. Text in parts says what the whole says, arguments are objects,
// and text without a call is as it was, except for frames and headers.
void tool_calls(std::string_view input) {
  if (input.empty()) return;
  constexpr std::array kFormats{ToolFormat::kHermes,     ToolFormat::kLlama3Json,
                                ToolFormat::kDeepSeekV3, ToolFormat::kOpenAi,
                                ToolFormat::kKimiK2,     ToolFormat::kMiniMaxM2,
                                ToolFormat::kSeedOss,    ToolFormat::kDeepSeekV32};
  const auto format = kFormats[static_cast<unsigned char>(input[0]) % kFormats.size()];
  const auto text = input.substr(1);
  const auto whole = read(format, text, std::max<std::size_t>(text.size(), 1));
  for (const auto& call : whole.calls)
    expect(ordered_json::parse(call.arguments).is_object(), "{} are no object", call.arguments);
  const bool keeps_text =
      format != ToolFormat::kOpenAi && rollout::text::markers_of(format).frames.empty();
  if (whole.calls.empty() && keeps_text)
    expect(whole.content == text, "{} for {}", whole.content, text);
  if (text.size() > 2000) return;
  const auto parts = read(format, text, 1);
  expect(parts.calls == whole.calls, "{} calls in parts, {} in the whole", parts.calls.size(),
         whole.calls.size());
  expect(parts.reasoning == whole.reasoning, "in parts {}, the whole {}", parts.reasoning,
         whole.reasoning);
  expect(parts.content == whole.content, "in parts {}, the whole {}", parts.content, whole.content);
}

}  // namespace ferry::fuzz
