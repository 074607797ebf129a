#include "models/distributed/meeting_store.h"

#include <algorithm>
#include <exception>
#include <thread>
#include <utility>

#include "distckpt/base/error.h"
#include "models/device/memory_error.h"
#include "models/distributed/failure_board.h"
#include "models/distributed/world.h"

namespace ferry::models {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kFirstPoll = std::chrono::milliseconds(1);
constexpr auto kLastPoll = std::chrono::milliseconds(50);
constexpr auto kMeetingLookAround = std::chrono::milliseconds(500);
constexpr int kMostTries = 3;

// Every rank that connects has met all others, so what it says is not long in coming.
constexpr auto kVerdictPatience = std::chrono::seconds(30);

// True if the connections were made on every rank, which each rank reports in the store. A rank
// that reports nothing has died: then the result is `mine`, and the group's next operation names
// the rank.
bool made_by_all(MeetingStore& store, bool mine, int rank, int size) {
  std::vector<std::string> keys;
  for (int other = 0; other < size; ++other) keys.push_back(fmt::format("made/{}", other));
  store.set(keys[static_cast<std::size_t>(rank)], std::vector<std::uint8_t>{mine});
  try {
    store.wait(keys, kVerdictPatience);
  } catch (const Error&) {
    return mine;
  }
  return std::ranges::all_of(store.multiGet(keys), [](const auto& told) { return told[0] != 0; });
}

}  // namespace

MeetingStore::MeetingStore(std::string prefix, const World& world)
    : PrefixStore(std::move(prefix), world.store()),
      board_(world.store()),
      rank_(world.rank()),
      patience_(world.timeout()) {}

std::vector<std::uint8_t> MeetingStore::get(const std::string& key) {
  wait({key});
  return PrefixStore::get(key);
}

std::vector<std::vector<std::uint8_t>> MeetingStore::multiGet(
    const std::vector<std::string>& keys) {
  wait(keys);
  return PrefixStore::multiGet(keys);
}

void MeetingStore::wait(const std::vector<std::string>& keys) {
  wait(keys, patience_);
}

void MeetingStore::wait(const std::vector<std::string>& keys,
                        const std::chrono::milliseconds& timeout) {
  const auto begin = Clock::now();
  auto looked = begin;
  for (auto poll = kFirstPoll; !check(keys); poll = std::min(2 * poll, kLastPoll)) {
    const auto now = Clock::now();
    require(now - begin < timeout, ErrorKind::kIo, "a rank did not come in {} s",
            timeout.count() / 1000);
    if (now - looked > kMeetingLookAround) {
      require(!failure_announced(board_, rank_), ErrorKind::kIo, "a rank has failed");
      looked = now;
    }
    std::this_thread::sleep_for(poll);
  }
}

void make_together(const std::string& prefix,
                   const World& world,
                   int rank,
                   int size,
                   const std::function<void(const c10::intrusive_ptr<c10d::Store>&)>& make) {
  for (int attempt = 1;; ++attempt) {
    const auto store =
        c10::make_intrusive<MeetingStore>(fmt::format("{}/{}", prefix, attempt), world);
    std::exception_ptr failure;
    try {
      make(store);
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      if (is_out_of_memory(error)) throw;
      failure = std::current_exception();
    }
    if (made_by_all(*store, failure == nullptr, rank, size)) return;
    if (attempt < kMostTries) continue;
    if (failure) std::rethrow_exception(failure);
    throw Error(ErrorKind::kIo, fmt::format("another rank could not connect {} times", attempt));
  }
}

}  // namespace ferry::models
