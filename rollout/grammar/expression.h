// A grammar over bytes as it is written down: expressions and rules that may use each other.
// program.h makes it an automaton.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "rollout/text/unicode/unicode.h"

namespace ferry::rollout::grammar {

struct Expression;
using ExpressionPtr = std::shared_ptr<const Expression>;

struct Expression {
  enum class Kind : std::uint8_t {
    kBytes,     // one byte from `first` to `last`
    kLiteral,   // `text`
    kSequence,  // children, in order
    kChoice,    // one of the children; without any nothing fits
    kRepeat,    // the only child, `min` to `max` times
    kRule,      // the rule of number `min`
  };
  static constexpr std::uint32_t kUnbounded = std::numeric_limits<std::uint32_t>::max();

  Kind kind = Kind::kSequence;
  std::uint8_t first = 0, last = 0;
  std::uint32_t min = 0, max = 0;
  std::string text{};
  std::vector<ExpressionPtr> children{};
};

ExpressionPtr bytes(std::uint8_t first, std::uint8_t last);
ExpressionPtr literal(std::string text);
ExpressionPtr sequence(std::vector<ExpressionPtr> children);
ExpressionPtr choice(std::vector<ExpressionPtr> children);
ExpressionPtr repeat(ExpressionPtr child, std::uint32_t min, std::uint32_t max);
ExpressionPtr optional(ExpressionPtr child);
ExpressionPtr star(ExpressionPtr child);
ExpressionPtr nothing();  // the empty text
ExpressionPtr never();    // no text at all

// One character of a set, in UTF-8. Surrogates are left out.
ExpressionPtr character(const text::CodePointSet& set);

// The rules of a grammar, by number. The first one added is where texts begin.
class Rules {
 public:
  // A rule whose expression comes later by define(), so that it can be used inside itself.
  std::uint32_t declare();
  void define(std::uint32_t rule, ExpressionPtr expression);
  // A rule of this expression, which uses of it share.
  ExpressionPtr add(ExpressionPtr expression);
  static ExpressionPtr use(std::uint32_t rule);

  const std::vector<ExpressionPtr>& all() const { return rules_; }

 private:
  std::vector<ExpressionPtr> rules_;
};

// Any text without `end` in it.
ExpressionPtr text_without(std::string_view end, Rules& rules);

}  // namespace ferry::rollout::grammar
