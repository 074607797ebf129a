#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "rollout/grammar/automaton.h"
#include "rollout/grammar/json_schema.h"
#include "rollout/text/shallow_json.h"
#include "tests/fuzz/property.h"
#include "tests/fuzz/targets.h"

namespace ferry::fuzz {
namespace {

using rollout::grammar::Automaton;
using rollout::grammar::Rules;

constexpr int kWalks = 6;
constexpr int kMostBytes = 300;

// The n-th byte that leads on, from a byte that the walk chooses.
int byte_from(Automaton& automaton, Automaton::State state, unsigned choice) {
  for (unsigned i = 0; i < 256; ++i) {
    const auto byte = (choice + i) % 256;
    if (automaton.next(state, static_cast<std::uint8_t>(byte)) != Automaton::kDead)
      return static_cast<int>(byte);
  }
  return -1;
}

// Texts that the automaton accepts are JSON, and every one goes on or may end. Half of the bytes
// are those of the schema, so that names which it lists are begun.
void walk(Automaton& automaton, std::string_view schema, unsigned seed) {
  auto state = automaton.start();
  std::string text;
  while (text.size() < kMostBytes) {
    seed = seed * 1664525U + 1013904223U;
    expect(automaton.accepts(state) || automaton.continues(state), "{} leads nowhere", text);
    if (automaton.accepts(state) && (seed >> 30 == 0 || !automaton.continues(state))) break;
    const auto choice = seed >> 20;
    const bool is_of_schema = (seed >> 19 & 1U) != 0 && !schema.empty();
    const auto byte = byte_from(
        automaton, state,
        is_of_schema ? static_cast<std::uint8_t>(schema[choice % schema.size()]) : choice);
    if (byte < 0) break;
    text += static_cast<char>(byte);
    state = automaton.next(state, static_cast<std::uint8_t>(byte));
  }
  if (automaton.accepts(state)) expect(nlohmann::json::accept(text), "{} is no JSON", text);
}

}  // namespace

void json_schema(std::string_view input) {
  const auto schema = rollout::text::parse_shallow_json(input);
  if (schema.is_discarded()) return;
  accepts([&] {
    try {
      Rules rules;
      const auto first = rules.declare();
      rules.define(first, rollout::grammar::json_schema(schema, "", rules));
      Automaton automaton(make_program(rules));
      for (unsigned i = 0; i < kWalks; ++i) walk(automaton, input, i);
    } catch (const nlohmann::json::exception&) {  // read_format() makes an Error of it
    }
  });
}

}  // namespace ferry::fuzz
