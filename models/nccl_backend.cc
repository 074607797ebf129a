#include "models/nccl_backend.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#include <utility>

#include "models/world.h"

namespace ferry::models {
namespace {

constexpr auto kPoll = std::chrono::milliseconds(50);

class Watch {
 public:
  Watch() : thread_([this] { look(); }) {}

  void add(c10::intrusive_ptr<c10d::Work> work,
           std::chrono::milliseconds timeout,
           std::function<Error(const std::string&)> failure) {
    const std::lock_guard lock(mutex_);
    entries_.push_back({.work = std::move(work),
                        .deadline = std::chrono::steady_clock::now() + timeout,
                        .failure = std::move(failure)});
  }

 private:
  struct Entry {
    c10::intrusive_ptr<c10d::Work> work{};
    std::chrono::steady_clock::time_point deadline{};
    std::function<Error(const std::string&)> failure{};
  };

  void look() {
    for (;; std::this_thread::sleep_for(kPoll)) {
      std::list<Entry> under_way;
      {
        const std::lock_guard lock(mutex_);
        under_way.swap(entries_);
      }
      std::erase_if(under_way, [](Entry& entry) { return is_done(entry); });
      const std::lock_guard lock(mutex_);
      entries_.splice(entries_.begin(), under_way);
    }
  }

  // Does not return if it never will be.
  static bool is_done(Entry& entry) {
    std::string why;
    try {
      if (entry.work->isCompleted() && !entry.work->exception()) return true;
      if (const auto error = entry.work->exception()) std::rethrow_exception(error);
      if (std::chrono::steady_clock::now() < entry.deadline) return false;
      why = "it is not done";
    } catch (const std::exception& error) {
      why = error.what();
    }
    const auto report = entry.failure(why).report();
    std::fputs(report.c_str(), stderr);
    std::fflush(stderr);
    std::_Exit(2);
  }

  std::mutex mutex_;
  std::list<Entry> entries_;
  std::thread thread_;
};

}  // namespace

// Lives as long as the process: there is no moment at which nothing may hang.
void watch_nccl(c10::intrusive_ptr<c10d::Work> work,
                std::chrono::milliseconds timeout,
                std::function<Error(const std::string& why)> failure) {
  static auto& watch = *std::make_unique<Watch>().release();
  watch.add(std::move(work), timeout, std::move(failure));
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
