// Pinned memory that the ranks of a host would take together. The kernel ends a process that pins
// more than there is, without a word: so it is compared before anything is loaded.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "trainer/plan/run_plan.h"

namespace ferry::trainer {

// A rank's part of its host.
struct HostShare {
  std::string host{};
  std::int64_t pinned = 0;     // bytes that the rank will pin, at most
  std::int64_t available = 0;  // bytes that the host, or the rank's control group, has
};

// A text for each host that has less than its ranks will pin, in the order of their first ranks;
// with a plan, what they pin by it.
std::vector<std::string> host_misfits(std::span<const HostShare> of_ranks);
std::vector<std::string> host_misfits(const RunPlan& plan, std::span<const HostShare> of_ranks);

}  // namespace ferry::trainer
