// The copies in the cache that a step begins and ends with.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "rollout/schedule/scheduler.h"

namespace ferry::rollout {

// A slot, and one that its content is copied to.
struct CopiedSlot {
  std::int64_t from = 0;
  std::int64_t to = 0;
};

struct SlotCopies {
  // Keys and values in each group: the ends of prompts that sequences begin with, after the rows of
  // the step are stored.
  std::vector<std::vector<CopiedSlot>> keys{};
  std::vector<CopiedSlot> begun_states{};  // before the step, of sequences that begin with others'
  std::vector<CopiedSlot> kept_states{};   // after it, for sequences to come
};

SlotCopies slot_copies(std::span<const ScheduledSequence> scheduled,
                       std::size_t num_groups,
                       std::int64_t block_size);

}  // namespace ferry::rollout
