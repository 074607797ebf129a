#include "models/distributed/mailbox.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <exception>
#include <mutex>
#include <numeric>
#include <optional>
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

using Clock = std::chrono::steady_clock;

constexpr int kTag = 0;
constexpr std::size_t kFirstBytes = 1024;
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
class Mailbox::Watch {
 public:
  explicit Watch(const Mailbox& mail)
      : mail_(mail), thread_([this](const std::stop_token& stop) { run(stop); }) {}

  // `what`: "the answer to update_actor from rank 3", which is the peer.
  void wait(const c10::intrusive_ptr<c10d::Work>& work, const std::string& what, int peer) {
    std::string why = "a rank has failed, or does not answer";
    if (!begin(work, peer)) throw lost(what, why, peer);
    try {
      const bool done = work->wait(kForEver);
      end();
      if (done) return;
    } catch (const std::exception& error) {
      end();
      if (is_out_of_memory(error)) throw;  // a cause, which the others wait for
      why = text_of(error);
    }
    throw lost(what, why, peer);
  }

 private:
  bool begin(const c10::intrusive_ptr<c10d::Work>& work, int peer) {
    const std::scoped_lock lock(mutex_);
    work_ = work;
    peer_ = peer;
    return !over_;
  }
  void end() {
    const std::scoped_lock lock(mutex_);
    work_.reset();
  }

  Error lost(const std::string& what, const std::string& why, int peer) const {
    if (!stuck_) return mail_.failure(what, why, fmt::format("rank {}", peer));
    return {ErrorKind::kIo,
            fmt::format("{}: {}: for {} s no message has arrived anywhere: rank {} hangs",
                        mail_.name_, what, mail_.patience_.limit.count() / 1000, peer),
            mail_.patience_.hint};
  }

  void run(const std::stop_token& stop) {
    const auto& store = mail_.world_.store();
    std::unique_lock lock(mutex_);
    auto asked = Clock::now();  // whether it is alive
    auto moved = asked;
    std::optional<std::int64_t> arrived;
    while (!changed_.wait_for(lock, stop, kLookAround, [&] { return stop.stop_requested(); })) {
      const auto peer = peer_;
      lock.unlock();
      // One that concerns this rank alone leaves the peer as it is, which will speak or end.
      bool failed = failure_announced(store, mail_.world_.rank()) && failure_announced(store, peer);
      const auto now = Clock::now();
      if (now - asked > mail_.world_.timeout()) {
        failed = failed || !is_alive(store, peer);
        asked = now;
      }
      if (const auto count = progress(store, mail_.name_); count != arrived) {
        arrived = count;
        moved = now;
      }
      lock.lock();
      stuck_ = !failed && now - moved > mail_.patience_.limit;
      over_ = failed || stuck_;
      if (!over_) continue;
      if (work_) work_->abort();
      return;
    }
  }

  const Mailbox& mail_;
  std::mutex mutex_;
  std::condition_variable_any changed_;
  c10::intrusive_ptr<c10d::Work> work_;  // that the rank waits for
  int peer_ = 0;
  bool over_ = false;  // waiting is in vain
  std::atomic<bool> stuck_ = false;
  std::jthread thread_;
};

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

// A message goes as its size and its first bytes, and the rest, if there is one.
std::vector<std::string> Mailbox::exchange(std::span<const Letter> letters,
                                           std::span<const int> from,
                                           std::string_view what) const {
  if (letters.empty() && from.empty()) return {};
  struct Part {
    std::string name;
    int peer = 0;
    c10::intrusive_ptr<c10d::Work> work;
  };
  const auto starting = [&](const char* way, int peer, at::Tensor part, auto start) {
    Part started{.name = fmt::format("{} {} rank {}", what, way, peer), .peer = peer, .work = {}};
    std::vector<at::Tensor> tensors{std::move(part)};
    try {
      started.work = (*gloo_.*start)(tensors, peer, kTag);
    } catch (const std::exception& error) {
      if (is_out_of_memory(error)) throw;
      throw failure(started.name, text_of(error), fmt::format("rank {}", peer));
    }
    return started;
  };
  const auto send_part = [&](at::Tensor part, int to) {
    return starting("to", to, std::move(part), &c10d::Backend::send);
  };
  const auto receive_part = [&](at::Tensor part, int rank) {
    return starting("from", rank, std::move(part), &c10d::Backend::recv);
  };

  std::vector<std::string> received(from.size());
  std::vector<at::Tensor> firsts;
  std::vector<Part> arriving, leaving, rests;
  for (const auto rank : from) {
    firsts.push_back(at::empty({kFirstBytes}, at::kByte));
    arriving.push_back(receive_part(firsts.back(), rank));
  }
  for (const auto& [to, bytes] : letters) {
    auto first = at::zeros({kFirstBytes}, at::kByte);
    auto* const data = static_cast<char*>(first.mutable_data_ptr());
    const auto size = static_cast<std::int64_t>(bytes.size());
    std::memcpy(data, &size, sizeof(size));
    const auto begun = bytes.copy(data + sizeof(size), kFirstBytes - sizeof(size));
    leaving.push_back(send_part(std::move(first), to));
    if (begun == bytes.size()) continue;
    auto rest = at::empty({size - static_cast<std::int64_t>(begun)}, at::kByte);
    (void)bytes.copy(static_cast<char*>(rest.mutable_data_ptr()), std::string::npos, begun);
    leaving.push_back(send_part(std::move(rest), to));
  }

  Watch watch(*this);
  for (std::size_t i = 0; i < from.size(); ++i) {
    watch.wait(arriving[i].work, arriving[i].name, from[i]);
    const auto* const data = static_cast<const char*>(firsts[i].const_data_ptr());
    std::int64_t size = 0;
    std::memcpy(&size, data, sizeof(size));
    auto& bytes = received[i];
    bytes.resize(static_cast<std::size_t>(size));
    const auto begun = std::min(bytes.size(), kFirstBytes - sizeof(size));
    std::memcpy(bytes.data(), data + sizeof(size), begun);
    if (begun < bytes.size())
      rests.push_back(
          receive_part(at::from_blob(bytes.data() + begun,
                                     {static_cast<std::int64_t>(bytes.size() - begun)}, at::kByte),
                       from[i]));
  }
  for (const auto& [name, rank, work] : rests) watch.wait(work, name, rank);
  for (const auto& [name, rank, work] : leaving) watch.wait(work, name, rank);
  if (const auto now = Clock::now(); !from.empty() && now - counted_ > kLookAround) {
    count_progress(world_.store(), name_);
    counted_ = now;
  }
  return received;
}

void Mailbox::send(std::string_view bytes, int to, std::string_view what) const {
  (void)exchange(std::vector{Letter{to, std::string(bytes)}}, {}, what);
}

std::string Mailbox::receive(int from, std::string_view what) const {
  return std::move(exchange({}, std::span(&from, 1), what).front());
}

}  // namespace ferry::models
