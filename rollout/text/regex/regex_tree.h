// A regular expression as a tree: the parser's result and the compiler's input.
#pragma once

#include <cstdint>
#include <limits>
#include <string_view>
#include <vector>

#include "rollout/text/unicode/unicode.h"

namespace ferry::rollout::text {

struct RegexNode {
  enum class Kind {
    kSet,        // one character
    kSequence,   // children, in order
    kChoice,     // children, the first that matches
    kRepeat,     // the only child, repeated
    kLookAhead,  // the only child, like the next two
    kLookAheadNot,
    kAtomic,
    kLineBegin,
    kLineEnd,
    kTextBegin,
    kTextEnd,
  };
  enum class Greed { kGreedy, kLazy, kPossessive };
  static constexpr std::uint32_t kUnbounded = std::numeric_limits<std::uint32_t>::max();

  Kind kind = Kind::kSequence;
  CodePointSet set{};
  std::vector<RegexNode> children{};
  std::uint32_t min = 0, max = 0;  // of a repetition
  Greed greed = Greed::kGreedy;

  bool can_be_empty() const;
};

// Ruby's: \d, \w and \s are Unicode's. ECMAScript's: they are ASCII, but what \D, \W and \S leave
// out is Unicode's, so that both agree on all that is matched.
enum class RegexSyntax { kRuby, kEcmaScript };

RegexNode parse_regex(std::string_view pattern, RegexSyntax syntax = RegexSyntax::kRuby);

}  // namespace ferry::rollout::text
