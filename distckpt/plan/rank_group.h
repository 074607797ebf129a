// Ranks that do one thing together, through the one collective that this needs. Whoever runs the
// ranks supplies it: process groups, threads of a test.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace ferry::distckpt {

struct RankGroup {
  int rank = 0;
  int size = 1;
  // The bytes of every rank, in the order of ranks; returns when all have called it.
  std::function<std::vector<std::string>(std::string_view)> all_gather_bytes{};

  std::vector<std::string> gather(std::string_view mine) const;  // of a lone rank: its own
};

// Runs `body` on every rank and returns when all are done. Where it throws an Error on one rank,
// all throw: that rank its own, the others Error(kCancelled) that says which rank failed of what.
void run_together(const RankGroup& group, const std::function<void()>& body);

}  // namespace ferry::distckpt
