#include "models/mailbox.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <fmt/ranges.h>

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
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>
#include <vector>

#include "distckpt/error.h"
#include "models/failure_board.h"
#include "models/gloo_backend.h"
#include "models/world.h"

namespace ferry::models {
namespace {

constexpr int kTag = 0;
constexpr auto kLookAround = std::chrono::milliseconds(500);
constexpr std::chrono::milliseconds kForEver = std::chrono::hours(24 * 365);

}  // namespace

Mailbox::Mailbox(World& world, std::string name) : world_(world), name_(std::move(name)) {
  if (world.size() == 1) return;
  gloo_ = make_gloo(c10::make_intrusive<c10d::PrefixStore>(name_, world.store()), world.rank(),
                    world.size(), world);
}

Mailbox::~Mailbox() = default;

// A rank whose peer waits for a third one, which has failed, would wait for ever: so somebody looks
// around meanwhile, and aborts the wait.
void Mailbox::wait(const std::function<c10::intrusive_ptr<c10d::Work>()>& start,
                   const char* what,
                   int peer) const {
  std::string why = "a rank has failed, or does not answer";
  try {
    const auto work = start();
    std::jthread watcher([&](const std::stop_token& stop) {
      std::mutex mutex;
      std::condition_variable_any changed;
      std::unique_lock lock(mutex);
      auto asked = std::chrono::steady_clock::now();  // whether it is alive
      while (!changed.wait_for(lock, stop, kLookAround, [&] { return stop.stop_requested(); })) {
        bool failed = failure_announced(world_.store());
        if (const auto now = std::chrono::steady_clock::now(); now - asked > world_.timeout()) {
          failed = failed || !is_alive(world_.store(), peer);
          asked = now;
        }
        if (failed) return work->abort();
      }
    });
    if (work->wait(kForEver)) return;
  } catch (const c10::Error& error) {
    why = error.what_without_backtrace();
  } catch (const std::exception& error) {
    why = error.what();
  }
  std::vector<int> all(static_cast<std::size_t>(world_.size()));
  std::iota(all.begin(), all.end(), 0);
  auto missing = missing_ranks(world_.store(), name_, all, world_.rank());
  if (missing.empty()) missing.push_back(fmt::format("rank {}", peer));
  throw Error(ErrorKind::kIo,
              fmt::format("{}: {} rank {} failed: missing: {} ({})", name_, what, peer,
                          fmt::join(missing, ", "), why),
              "a rank that is missing has died or hangs: see its own output");
}

void Mailbox::send(std::string_view bytes, int to) const {
  const auto send_one = [&](at::Tensor part) {
    std::vector<at::Tensor> tensors{std::move(part)};
    wait([&] { return gloo_->send(tensors, to, kTag); }, "a message to", to);
  };
  auto length = at::empty({1}, at::kLong);
  *length.mutable_data_ptr<std::int64_t>() = static_cast<std::int64_t>(bytes.size());
  send_one(length);
  if (bytes.empty()) return;
  auto copy = at::empty({static_cast<std::int64_t>(bytes.size())}, at::kByte);
  std::memcpy(copy.mutable_data_ptr(), bytes.data(), bytes.size());
  send_one(copy);
}

std::string Mailbox::receive(int from) const {
  const auto receive_one = [&](at::Tensor part) {
    std::vector<at::Tensor> tensors{std::move(part)};
    wait([&] { return gloo_->recv(tensors, from, kTag); }, "a message of", from);
  };
  auto length = at::empty({1}, at::kLong);
  receive_one(length);
  std::string bytes(static_cast<std::size_t>(*length.const_data_ptr<std::int64_t>()), '\0');
  if (!bytes.empty())
    receive_one(at::from_blob(bytes.data(), {static_cast<std::int64_t>(bytes.size())}, at::kByte));
  return bytes;
}

}  // namespace ferry::models
