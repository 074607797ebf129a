#include "rollout/schedule/state_snapshots.h"

#include <algorithm>

#include "distckpt/base/error.h"

namespace ferry::rollout {

StateSnapshots::StateSnapshots(std::int64_t first_slot, std::int64_t num_slots)
    : first_slot_(first_slot), slots_(static_cast<std::size_t>(num_slots)) {}

std::int64_t StateSnapshots::use(const PrefixHash& hash) {
  const auto index = kept_.at(hash);
  slots_[index].used = ++num_uses_;
  return first_slot_ + static_cast<std::int64_t>(index);
}

// A slot that a step takes is used later than all others: no other prefix of the step takes it, for
// no more are announced than there are slots.
std::int64_t StateSnapshots::keep(const PrefixHash& hash) {
  require(announced_.erase(hash) > 0, ErrorKind::kBug, "states are kept that nobody announced");
  if (kept_.contains(hash)) return -1;
  auto& slot = *std::ranges::min_element(slots_, {}, &Slot::used);
  if (slot.used > 0) kept_.erase(slot.hash);
  slot = {.hash = hash, .used = ++num_uses_};
  const auto index = static_cast<std::size_t>(&slot - slots_.data());
  kept_.emplace(hash, index);
  return first_slot_ + static_cast<std::int64_t>(index);
}

void StateSnapshots::forget(const PrefixHash& hash) {
  const auto found = kept_.find(hash);
  if (found == kept_.end()) return;
  slots_[found->second] = {};
  kept_.erase(found);
}

}  // namespace ferry::rollout
