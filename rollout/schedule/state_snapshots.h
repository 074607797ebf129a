// Slots that keep the states of linear attention behind prefixes of prompts (snapshots), for
// sequences that begin with these: they copy the states, and compute what follows. The slot that
// was unused longest is taken for another prefix.
//
// A sequence that begins announces the prefixes whose states it will keep. Sequences that begin
// alike wait until a step keeps them. Slots are taken when a step has been scheduled: the next step
// may copy them, and this one copies what they hold so far before it keeps others there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "rollout/schedule/sequence.h"

namespace ferry::rollout {

class StateSnapshots {
 public:
  // Slots first_slot .. first_slot + num_slots - 1.
  StateSnapshots(std::int64_t first_slot, std::int64_t num_slots);

  // True if a step may copy the states of a prefix.
  bool has(const PrefixHash& hash) const { return kept_.contains(hash); }
  // The slot of a prefix that it has, which is then the last to be taken.
  std::int64_t use(const PrefixHash& hash);
  // True if a running sequence will keep the prefix.
  bool is_coming(const PrefixHash& hash) const { return announced_.contains(hash); }

  // Prefixes that may be announced: those that are to come have the other slots.
  std::int64_t num_free() const { return std::ssize(slots_) - std::ssize(announced_); }
  void announce(const PrefixHash& hash) { announced_.insert(hash); }
  // Announced no longer: its sequence will not keep it.
  void withdraw(const PrefixHash& hash) { announced_.erase(hash); }
  // Gives an announced prefix a slot; withdraws it. Returns -1 if there is one already.
  std::int64_t keep(const PrefixHash& hash);
  // The prefix's blocks have other content now. Nothing happens if it has no slot.
  void forget(const PrefixHash& hash);

 private:
  struct Slot {
    PrefixHash hash{};
    std::uint64_t used = 0;  // the larger, the later; 0: nothing is kept there
  };

  std::int64_t first_slot_;
  std::vector<Slot> slots_;
  std::unordered_map<PrefixHash, std::size_t, PrefixHash::Low> kept_;  // index of the slot
  std::unordered_set<PrefixHash, PrefixHash::Low> announced_;
  std::uint64_t num_uses_ = 0;
};

}  // namespace ferry::rollout
