// Why a run of several ranks ends: the one that fails says so in the store of all, and the others,
// who miss it in their next collective, repeat it. So each rank's last words name the cause.
//
// The store is rank 0's, who may hang itself: nothing here waits for it longer than a few seconds.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace c10d {
class Store;
}

namespace ferry::models {

class World;

// Tells the others, once; of a lone rank, or where the store is gone, nobody.
void announce_failure(const World& world, const std::string& why);

// Returns when all ranks have announced that they failed, or after a few seconds: a launcher ends
// every rank as soon as one is gone, and none should go before the others have spoken.
void wait_for_failures(const World& world);

// Whether any rank has announced a failure, or the store's owner, rank 0, is gone.
bool any_failure(const c10::intrusive_ptr<c10d::Store>& store);

// The same for those who look around often, while they wait for others as long as these work: what
// a store says that is only slow is no failure.
bool failure_announced(const c10::intrusive_ptr<c10d::Store>& store);

// Counts what was got done under a name that ranks share, for those who wait while others work.
void count_progress(const c10::intrusive_ptr<c10d::Store>& store, const std::string& name);
// The count; none where the store does not answer.
std::optional<std::int64_t> progress(const c10::intrusive_ptr<c10d::Store>& store,
                                     const std::string& name);

// Answers, from a thread of its own, when others ask who is still alive. Until it goes.
std::shared_ptr<void> stay_present(const c10::intrusive_ptr<c10d::Store>& store, int rank);

// Asks it, and waits a moment; of a rank that never answers anybody, a thread of a test: true.
bool is_alive(const c10::intrusive_ptr<c10d::Store>& store, int rank);

// A collective of these ranks (of the world) that did not come about, of which `rank` reports:
// each rank that came marks it under `meeting`, a name that they share. Takes a moment, in which
// the others mark it, too.
//
// Returns who is missing and what they have said of it: "rank 3", "rank 1, which failed: ...".
// Ranks that are alive, and may wait for somebody who is missing, are not named if others are.
std::vector<std::string> missing_ranks(const c10::intrusive_ptr<c10d::Store>& store,
                                       const std::string& meeting,
                                       const std::vector<int>& ranks,
                                       int rank);

}  // namespace ferry::models
