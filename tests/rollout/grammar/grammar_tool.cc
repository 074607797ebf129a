// For tests/interop/rollout/test_allowed_tokens.py: `grammar_tool FOLDER VOCAB_SIZE EOS` reads
// lines of JSON, {"format", "tokens"}, and writes for each {"allowed": [ids before the first token,
// before the second, ..., after the last]}, or {"error"}. With a fourth argument it writes
// {"seconds": [of each of these sets]} instead.
#include <chrono>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>

#include "distckpt/base/error.h"
#include "rollout/grammar/token_constraint.h"

namespace {

namespace grammar = ferry::rollout::grammar;
using nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

ordered_json answer(grammar::StructuredOutputManager& manager,
                    const ordered_json& asked,
                    std::int64_t vocab_size,
                    std::int64_t eos,
                    bool is_timed) {
  const auto ending = std::make_shared<const std::vector<std::int64_t>>(1, eos);
  auto sets = ordered_json::array(), seconds = ordered_json::array();
  const auto before = Clock::now();
  grammar::TokenConstraint constraint(manager.compile(asked["format"].dump()), ending);
  const std::chrono::duration<double> to_compile = Clock::now() - before;
  std::vector<std::uint8_t> bits(static_cast<std::size_t>((vocab_size + 7) / 8));
  const auto add = [&] {
    const auto begin = Clock::now();
    constraint.write_allowed(bits);
    seconds.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
    if (is_timed) return;
    auto& set = sets.emplace_back(ordered_json::array());
    for (std::int64_t i = 0; i < vocab_size; ++i)
      if ((bits[static_cast<std::size_t>(i / 8)] >> i % 8 & 1) != 0) set.push_back(i);
  };
  add();
  for (const auto& token : asked["tokens"]) {
    constraint.accept(token.get<std::int64_t>());
    add();
  }
  if (is_timed) return {{"compile", to_compile.count()}, {"seconds", std::move(seconds)}};
  return {{"allowed", std::move(sets)}};
}

}  // namespace

int main(int argc, char** argv) {
  const auto tokenizer = ferry::rollout::text::Tokenizer::from_folder(argv[1]);
  const auto vocab_size = std::stoll(argv[2]);
  grammar::StructuredOutputManager manager(*tokenizer, vocab_size);
  for (std::string line; std::getline(std::cin, line);) {
    try {
      std::cout << answer(manager, ordered_json::parse(line), vocab_size, std::stoll(argv[3]),
                          argc > 4)
                << std::endl;
    } catch (const ferry::Error& error) {
      std::cout << ordered_json{{"error", error.what()}} << std::endl;
    }
  }
}
