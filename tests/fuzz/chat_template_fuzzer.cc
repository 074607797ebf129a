#include <nlohmann/json.hpp>
#include <string>

#include "rollout/text/chat_template.h"
#include "rollout/text/unicode/unicode.h"
#include "tests/fuzz/property.h"
#include "tests/fuzz/targets.h"

namespace ferry::fuzz {
namespace {

using nlohmann::ordered_json;

const ordered_json& messages() {
  static const auto chat = ordered_json::parse(R"([
      {"role": "system", "content": "Be brief."}, {"role": "user", "content": " H\u00e9 \u6f22 "},
      {"role": "assistant", "content": null, "tool_calls": [{"id": "abcdefghi", "type": "function",
          "function": {"name": "f", "arguments": {"x": [1, 2.5, true]}}}]},
      {"role": "tool", "content": "21", "tool_call_id": "abcdefghi"},
      {"role": "assistant", "content": "<think>\nso\n</think>\n\nYes."}])");
  return chat;
}

}  // namespace

// The text of a template is UTF-8, and the same at the second call.
void chat_template(std::string_view input) {
  if (input.find("strftime_now") != input.npos) return;
  accepts([&] {
    const rollout::text::ChatTemplate read(input, "fuzz");
    const rollout::text::ChatOptions options{.add_generation_prompt = true, .tools = messages()};
    const auto text = read.apply(messages(), options);
    expect(rollout::text::is_valid_utf8(text), "the text is not UTF-8");
    expect(read.apply(messages(), options) == text, "another text for the same messages");
  });
}

}  // namespace ferry::fuzz
