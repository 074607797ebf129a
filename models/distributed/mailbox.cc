#include "models/distributed/mailbox.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <fmt/ranges.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <exception>
#include <mutex>
#include <numeric>
#include <stop_token>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "distckpt/base/error.h"
#include "models/device/memory_error.h"
#include "models/distributed/failure_board.h"
#include "models/distributed/gloo_backend.h"
#include "models/distributed/meeting_store.h"
#include "models/distributed/world.h"

namespace ferry::models {
namespace {

constexpr int kTag = 0;
constexpr auto kLookAround = std::chrono::milliseconds(500);
constexpr auto kGrace = std::chrono::seconds(5);
constexpr std::chrono::milliseconds kForEver = std::chrono::hours(24 * 365);

}  // namespace

Mailbox::Mailbox(World& world, std::string name, Patience patience)
    : world_(world), name_(std::move(name)), patience_(std::move(patience)) {
  // Rank 0 speaks first: others may wait for it, while it waits for the one that hangs.
  if (world.rank() > 0) patience_.limit += kGrace;
  if (world.size() == 1) return;
  try {
    gloo_ = make_gloo(c10::make_intrusive<MeetingStore>(name_, world), world.rank(), world.size(),
                      world);
  } catch (const std::exception& error) {
    if (is_out_of_memory(error))
      throw error_of(error, fmt::format("making the mailbox {}", name_), "");
    throw failure("meeting the others", text_of(error), "nobody");
  }
}

Mailbox::~Mailbox() = default;

// A rank whose peer waits for a third one, which has failed, would wait for ever. So a second
// thread looks for failures meanwhile, and aborts the wait.
void Mailbox::wait(const std::function<c10::intrusive_ptr<c10d::Work>()>& start,
                   const std::string& what,
                   int peer) const {
  std::string why = "a rank has failed, or does not answer";
  std::atomic<bool> stuck = false;
  try {
    const auto work = start();
    std::jthread watcher([&](const std::stop_token& stop) {
      std::mutex mutex;
      std::condition_variable_any changed;
      std::unique_lock lock(mutex);
      auto asked = std::chrono::steady_clock::now();  // whether it is alive
      auto moved = asked;
      auto arrived = progress(world_.store(), name_);
      while (!changed.wait_for(lock, stop, kLookAround, [&] { return stop.stop_requested(); })) {
        bool failed = failure_announced(world_.store());
        const auto now = std::chrono::steady_clock::now();
        if (now - asked > world_.timeout()) {
          failed = failed || !is_alive(world_.store(), peer);
          asked = now;
        }
        if (const auto count = progress(world_.store(), name_); count != arrived) {
          arrived = count;
          moved = now;
        }
        stuck = !failed && now - moved > patience_.limit;
        if (failed || stuck) return work->abort();
      }
    });
    if (work->wait(kForEver)) return;
  } catch (const std::exception& error) {
    if (is_out_of_memory(error)) throw;  // a cause, which the others wait for
    why = text_of(error);
  }
  if (stuck) {
    throw Error(ErrorKind::kIo,
                fmt::format("{}: {}: for {} s no message has arrived anywhere: rank {} hangs",
                            name_, what, patience_.limit.count() / 1000, peer),
                patience_.hint);
  }
  throw failure(what, why, fmt::format("rank {}", peer));
}

Error Mailbox::failure(const std::string& what,
                       const std::string& why,
                       const std::string& suspect) const {
  std::vector<int> all(static_cast<std::size_t>(world_.size()));
  std::iota(all.begin(), all.end(), 0);
  auto missing = missing_ranks(world_.store(), name_, all, world_.rank());
  if (missing.empty()) missing.push_back(suspect);
  return {
      ErrorKind::kIo,
      fmt::format("{}: {} failed: missing: {} ({})", name_, what, fmt::join(missing, ", "), why),
      "a rank that is missing has died or hangs: see its own output"};
}

void Mailbox::send(std::string_view bytes, int to, std::string_view what) const {
  const auto send_one = [&](at::Tensor part) {
    std::vector<at::Tensor> tensors{std::move(part)};
    wait([&] { return gloo_->send(tensors, to, kTag); }, fmt::format("{} to rank {}", what, to),
         to);
  };
  auto length = at::empty({1}, at::kLong);
  *length.mutable_data_ptr<std::int64_t>() = static_cast<std::int64_t>(bytes.size());
  send_one(length);
  if (bytes.empty()) return;
  auto copy = at::empty({static_cast<std::int64_t>(bytes.size())}, at::kByte);
  std::memcpy(copy.mutable_data_ptr(), bytes.data(), bytes.size());
  send_one(copy);
}

std::string Mailbox::receive(int from, std::string_view what) const {
  const auto receive_one = [&](at::Tensor part) {
    std::vector<at::Tensor> tensors{std::move(part)};
    wait([&] { return gloo_->recv(tensors, from, kTag); },
         fmt::format("{} from rank {}", what, from), from);
  };
  auto length = at::empty({1}, at::kLong);
  receive_one(length);
  std::string bytes(static_cast<std::size_t>(*length.const_data_ptr<std::int64_t>()), '\0');
  if (!bytes.empty())
    receive_one(at::from_blob(bytes.data(), {static_cast<std::int64_t>(bytes.size())}, at::kByte));
  count_progress(world_.store(), name_);
  return bytes;
}

}  // namespace ferry::models
