// For tests/interop/serve: a line of JSON in, {"format", "text", "tools"}, a line out, {"content",
// "reasoning", "calls"}.
#include <exception>
#include <iostream>
#include <string>

#include "rollout/text/shallow_json.h"
#include "rollout/text/tool_calls.h"

namespace {

void answer_lines() {
  using ferry::rollout::text::json_text;
  using ferry::rollout::text::kToolFormats;
  using ferry::rollout::text::parse_exact_json;
  using nlohmann::ordered_json;
  for (std::string line; std::getline(std::cin, line);) {
    const auto asked = ordered_json::parse(line);
    ferry::rollout::text::ToolCallParser parser(
        ferry::find_in(kToolFormats, asked["format"].get<std::string>()).value(), asked["tools"]);
    auto part = parser.take(asked["text"].get<std::string>());
    auto rest = parser.finish();
    part.calls.insert(part.calls.end(), rest.calls.begin(), rest.calls.end());
    auto calls = ordered_json::array();
    for (const auto& call : part.calls)
      calls.push_back({{"name", call.name}, {"arguments", parse_exact_json(call.arguments)}});
    std::cout << json_text({{"content", part.content + rest.content},
                            {"reasoning", part.reasoning + rest.reasoning},
                            {"calls", calls}})
              << "\n";
  }
}

}  // namespace

int main() {
  try {
    answer_lines();
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
