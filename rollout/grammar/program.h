// A grammar's rules as one graph: nodes with edges over bytes, edges that read nothing, and calls
// of rules, which go on at another node when the rule has ended. All that leads nowhere is cut off.
#pragma once

#include <cstdint>
#include <vector>

#include "rollout/grammar/expression.h"

namespace ferry::rollout::grammar {

struct Program {
  struct Edge {
    std::uint8_t first = 0, last = 0;
    std::uint32_t to = 0;
  };
  struct Call {
    std::uint32_t rule = 0;
    std::uint32_t then = 0;
  };
  struct Node {
    std::vector<Edge> edges{};
    std::vector<std::uint32_t> jumps{};  // edges that read nothing
    std::vector<Call> calls{};
    bool is_end = false;  // of a rule
    // Nothing is read between here and the end of the rule, and nothing else can be.
    bool only_returns = false;
  };
  struct Rule {
    std::uint32_t begin = 0;
    std::uint32_t end = 0;
  };

  std::vector<Node> nodes{};
  std::vector<Rule> rules{};  // a text is one of rule 0
};

// Throws Error(kUsage) if no text fits, a rule begins with itself, or the grammar is too large.
Program make_program(const Rules& rules);

}  // namespace ferry::rollout::grammar
