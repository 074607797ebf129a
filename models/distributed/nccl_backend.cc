#include "models/distributed/nccl_backend.h"

#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#include <utility>

#include "models/distributed/world.h"

namespace ferry::models {
namespace {

constexpr auto kNcclPoll = std::chrono::milliseconds(50);
constexpr auto kAskOthers = std::chrono::seconds(1);  // the store, over the network
// The time that work has to end after another rank has failed: threads that wait for it report
// their failure first. The rank that has failed waits for this one's words (failure_board.cc).
constexpr auto kNcclGrace = std::chrono::seconds(1);

class Watch {
 public:
  // Threads begin on device 0, where asking for work would make a context of half a GiB.
  explicit Watch(c10::DeviceIndex device)
      : looks_([this, device] {
          c10::cuda::set_device(device);
          look();
        }),
        guards_([this] { guard(); }) {}

  void add(c10::intrusive_ptr<c10d::Work> work,
           std::shared_ptr<const WatchedRun> run,
           std::function<Error(const std::string&)> failure) {
    const auto deadline = Clock::now() + run->timeout;
    const std::lock_guard lock(mutex_);
    entries_.push_back({.work = std::move(work),
                        .run = std::move(run),
                        .deadline = deadline,
                        .failure = std::move(failure)});
  }

 private:
  using Clock = std::chrono::steady_clock;

  struct Entry {
    c10::intrusive_ptr<c10d::Work> work{};
    std::shared_ptr<const WatchedRun> run{};
    Clock::time_point deadline{};
    std::function<Error(const std::string&)> failure{};
  };

  void look() {
    for (;; std::this_thread::sleep_for(kNcclPoll)) {
      std::list<Entry> under_way;
      {
        const std::lock_guard lock(mutex_);
        under_way.swap(entries_);
      }
      std::erase_if(under_way, [this](Entry& entry) { return is_done(entry); });
      if (!under_way.empty()) ask_others(under_way);
      const std::lock_guard lock(mutex_);
      entries_.splice(entries_.begin(), under_way);
    }
  }

  // Asks whether another rank has failed, and then shortens the deadlines of all work, which may
  // wait for that rank.
  void ask_others(std::list<Entry>& under_way) {
    const auto now = Clock::now();
    if (now < asked_ + kAskOthers) return;
    asked_ = now;
    if (!failed_ && under_way.front().run->has_failed()) failed_ = now;
    if (!failed_) return;
    for (auto& entry : under_way) entry.deadline = std::min(entry.deadline, *failed_ + kNcclGrace);
  }

  // CUDA answers no thread while another one copies the results of a kernel that never ends to
  // pageable memory. look() hangs then, and this ends the process in its place.
  void guard() {
    for (;; std::this_thread::sleep_for(kNcclPoll)) {
      std::optional<Entry> stuck;
      {
        const std::lock_guard lock(mutex_);
        if (asked_about_ != nullptr && Clock::now() > asked_about_since_ + kAskOthers)
          stuck = {.run = asked_about_->run,
                   .deadline = asked_about_->deadline,
                   .failure = asked_about_->failure};
      }
      if (stuck && (Clock::now() >= stuck->deadline || stuck->run->has_failed()))
        end(*stuck, "it is not done, nor does CUDA answer");
    }
  }

  void set_asked(const Entry* entry) {
    const std::lock_guard lock(mutex_);
    asked_about_ = entry;
    asked_about_since_ = Clock::now();
  }

  // True if the work of `entry` is done; if so, forgets it. Ends the process if it never will be.
  bool is_done(Entry& entry) {
    std::string why;
    set_asked(&entry);
    try {
      const bool completed = entry.work->isCompleted();
      if (const auto error = entry.work->exception()) std::rethrow_exception(error);
      if (completed) entry.work.reset();
    } catch (const std::exception& error) {
      why = error.what();
    }
    set_asked(nullptr);
    if (!entry.work) return true;
    if (why.empty() && Clock::now() < entry.deadline) return false;
    end(entry, why.empty() ? "it is not done" : why);
  }

  [[noreturn]] static void end(const Entry& entry, const std::string& why) {
    const auto error = entry.failure(why);
    std::fputs(error.report().c_str(), stderr);
    std::fflush(stderr);
    entry.run->last_words(error);
    std::_Exit(2);
  }

  std::mutex mutex_;
  std::list<Entry> entries_;
  Clock::time_point asked_{};
  std::optional<Clock::time_point> failed_{};  // when this rank learnt that another one has
  const Entry* asked_about_ = nullptr;         // by look(), which keeps it
  Clock::time_point asked_about_since_{};
  std::thread looks_, guards_;
};

}  // namespace

// The watch lives as long as the process, since work may hang at any moment.
void watch_nccl(c10::intrusive_ptr<c10d::Work> work,
                std::shared_ptr<const WatchedRun> run,
                std::function<Error(const std::string& why)> failure) {
  // Work of a graph that is being captured begins when the graph is launched.
  if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) return;
  static auto& watch = *std::make_unique<Watch>(c10::cuda::current_device()).release();
  watch.add(std::move(work), std::move(run), std::move(failure));
}

c10::intrusive_ptr<c10d::Backend> make_nccl(const c10::intrusive_ptr<c10d::Store>& store,
                                            int rank,
                                            int size,
                                            const World& world) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  // watch_nccl() is first to say that a rank is missing; c10d would abort the process.
  options->timeout = 2 * world.timeout() + std::chrono::minutes(10);
  for (const char* const name : {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING",
                                 "TORCH_NCCL_DUMP_ON_TIMEOUT"})
    setenv(name, "0", /*overwrite=*/0);
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(
      c10::make_intrusive<c10d::PrefixStore>("nccl", store), rank, size, options);
}

void end_nccl(c10d::Backend& backend) {
  dynamic_cast<c10d::ProcessGroupNCCL&>(backend).shutdown();
}

}  // namespace ferry::models
