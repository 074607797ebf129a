// The reason why a run of several ranks ends. A rank that fails writes it to the store that all
// ranks share, and the others, which miss that rank in their next collective, repeat it. So each
// rank's last words name the cause.
//
// The store lives in rank 0, which may hang itself: nothing here waits for it longer than a few
// seconds. A store that is slow to answer says nothing: its owner may have been stopped for a
// while, and the timeout of the run says how long the others wait. One that is gone is a failure.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "distckpt/base/error.h"

namespace c10d {
class Store;
}

namespace ferry::models {

class World;

// Says that the failure of this rank concerns `ranks` alone, itself among them: others go on
// without them. Without this call it concerns all.
void limit_failure(const World& world, const std::vector<int>& ranks);

// Tells the ranks that it concerns why this one fails: the message, its context and hint. Does
// nothing in a run of one rank, or where the store is gone.
void announce_failure(const World& world, const Error& error);

// Returns when all ranks that a failure of this one concerns have announced that they failed, or
// after a few seconds: a launcher ends every rank as soon as one is gone, and none should go before
// the others have spoken.
void wait_for_failures(const World& world);

// True if a rank has announced a failure that concerns `rank`, or the store is gone.
bool failure_announced(const c10::intrusive_ptr<c10d::Store>& store, int rank);

// Adds one to the counter `name`, which ranks share. Ranks that wait see by it that others work.
void count_progress(const c10::intrusive_ptr<c10d::Store>& store, const std::string& name);
// The value of the counter; nullopt where the store does not answer.
std::optional<std::int64_t> progress(const c10::intrusive_ptr<c10d::Store>& store,
                                     const std::string& name);

// Starts a thread that answers is_alive() for this rank until the returned handle is destroyed.
std::shared_ptr<void> stay_present(const c10::intrusive_ptr<c10d::Store>& store, int rank);

// Asks rank `rank` whether it is alive, and waits a moment for its answer. A rank that never called
// stay_present(), such as a thread of a test, counts as alive.
bool is_alive(const c10::intrusive_ptr<c10d::Store>& store, int rank);

// Finds the ranks that are missing from a collective that did not complete. Called by `rank`, one
// of `ranks` (numbers in the world). Each rank that came marks the store under `meeting`, a name
// that they share; the call waits a moment for the marks of the others.
//
// Returns one text for each missing rank, with the failure that it announced: "rank 3", "rank 1,
// which failed: ...". Ranks that are alive, and may themselves wait for a missing one, are named
// only if no others are missing.
std::vector<std::string> missing_ranks(const c10::intrusive_ptr<c10d::Store>& store,
                                       const std::string& meeting,
                                       const std::vector<int>& ranks,
                                       int rank);

}  // namespace ferry::models
