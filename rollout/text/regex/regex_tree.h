// A regular expression as a tree: what the parser makes, and the compiler reads.
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
    kSequence,   // children, one behind the other
    kChoice,     // children, the first that fits
    kRepeat,     // of the only child
    kLookAhead,  // of the only child
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

RegexNode parse_regex(std::string_view pattern);

}  // namespace ferry::rollout::text
