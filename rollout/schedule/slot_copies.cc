#include "rollout/schedule/slot_copies.h"

namespace ferry::rollout {

SlotCopies slot_copies(std::span<const ScheduledSequence> scheduled,
                       std::size_t num_groups,
                       std::int64_t block_size) {
  SlotCopies copies{.keys = std::vector<std::vector<CopiedSlot>>(num_groups)};
  for (const auto& [sequence, num_new_tokens] : scheduled) {
    const auto last = static_cast<std::size_t>(sequence->num_computed_tokens / block_size);
    for (std::size_t group = 0; group < sequence->copied_from.size(); ++group) {
      const auto from = sequence->copied_from[group] * block_size;
      const auto to = sequence->block_tables[group][last] * block_size;
      for (std::int64_t i = 0; i < sequence->num_computed_tokens % block_size; ++i)
        copies.keys[group].push_back({.from = from + i, .to = to + i});
    }
    if (sequence->copied_state >= 0)
      copies.begun_states.push_back({.from = sequence->copied_state, .to = sequence->state_slot});
    if (sequence->kept_state >= 0)
      copies.kept_states.push_back({.from = sequence->state_slot, .to = sequence->kept_state});
  }
  return copies;
}

}  // namespace ferry::rollout
