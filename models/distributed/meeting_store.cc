#include "models/distributed/meeting_store.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "distckpt/base/error.h"
#include "models/distributed/failure_board.h"
#include "models/distributed/world.h"

namespace ferry::models {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kFirstPoll = std::chrono::milliseconds(1);
constexpr auto kLastPoll = std::chrono::milliseconds(50);
constexpr auto kMeetingLookAround = std::chrono::milliseconds(500);

}  // namespace

MeetingStore::MeetingStore(std::string prefix, const World& world)
    : PrefixStore(std::move(prefix), world.store()),
      board_(world.store()),
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
      require(!failure_announced(board_), ErrorKind::kIo, "a rank has failed");
      looked = now;
    }
    std::this_thread::sleep_for(poll);
  }
}

}  // namespace ferry::models
