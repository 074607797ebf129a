// For tests/interop/agents/test_turns.py: a line of JSON in, {"folder", "tools", "messages",
// "count"}, a line out, {"turn": [ids]} or {"error"}.
#include <exception>
#include <iostream>
#include <string>

#include "distckpt/base/error.h"
#include "trainer/dataset/prompt_examples.h"

namespace {

void answer_lines() {
  using nlohmann::ordered_json;
  for (std::string line; std::getline(std::cin, line);) {
    const auto asked = ordered_json::parse(line);
    ordered_json answer;
    try {
      const ferry::trainer::PromptEncoder encoder(asked["folder"].get<std::string>(), {},
                                                  asked["tools"]);
      answer["turn"] =
          encoder.encode_turn(asked["messages"], asked["count"].get<std::size_t>(), asked["tools"]);
    } catch (const ferry::Error& error) {
      answer["error"] = error.what();
    }
    std::cout << answer << "\n";
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
