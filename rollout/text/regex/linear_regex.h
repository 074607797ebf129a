// A regular expression that all of a text matches or does not, in time linear in the text, or
// quadratic with look-ahead, whatever the expression is: for patterns that strangers wrote. The
// syntax is that of regex.h without atomic groups, possessive repetitions, and look-ahead inside
// look-ahead.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "rollout/text/regex/regex_tree.h"

namespace ferry::rollout::text {

class LinearRegex {
 public:
  // The characters of a pattern whose counted repetitions are spelled out, at most.
  static constexpr std::size_t kMostStates = 2000;

  // ^ and $ are the ends of the text. Throws Error(kUsage) that names an unsupported part, or if
  // the pattern has more than kMostStates.
  explicit LinearRegex(std::string_view pattern);

  // No text matches that is not UTF-8.
  bool matches(std::string_view text) const;

 private:
  enum class Kind : std::uint8_t {
    kAccept,
    kSet,        // a character of sets_[other], then `next`
    kSplit,      // `next` or `other`
    kTextBegin,  // then `next`
    kTextEnd,
    kLookAhead,  // kAccept can be reached from `other`, then `next`
    kLookAheadNot,
  };
  struct State {
    Kind kind = Kind::kAccept;
    std::uint32_t next = 0;
    std::uint32_t other = 0;
  };

  std::uint32_t add(Kind kind, std::uint32_t next, std::uint32_t other = 0);
  // Adds states for a node, of which the last goes on at `next`; returns the first.
  std::uint32_t compile(const RegexNode& node, std::uint32_t next);
  std::uint32_t compile_repeat(const RegexNode& node, std::uint32_t next);
  // True if `first` leads to kAccept at the end of the text, or (not `whole`) anywhere.
  bool runs(std::uint32_t first, std::string_view text, std::size_t at, bool whole) const;

  std::string_view pattern_;  // while it is compiled
  std::vector<CodePointSet> sets_;
  std::vector<State> states_;
  bool looks_ahead_ = false;  // inside look-ahead, while it is compiled
};

}  // namespace ferry::rollout::text
