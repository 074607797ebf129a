#include "distckpt/base/threads.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <exception>
#include <fstream>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "distckpt/base/interruption.h"

namespace ferry::distckpt {
namespace fs = std::filesystem;
namespace {

// Microseconds of CPU time in each period, "max" or -1 without a quota.
std::optional<double> quota_of(const fs::path& group) {
  double quota = 0;
  double period = 0;
  const auto is_limit = [&] { return quota > 0 && period > 0; };
  if (std::ifstream(group / "cpu.max") >> quota >> period && is_limit()) return quota / period;
  if (std::ifstream(group / "cpu.cfs_quota_us") >> quota &&
      std::ifstream(group / "cpu.cfs_period_us") >> period && is_limit())
    return quota / period;
  return std::nullopt;
}

int cores_of_affinity() {
  cpu_set_t cores;
  if (::sched_getaffinity(0, sizeof cores, &cores) == 0) return CPU_COUNT(&cores);
  return static_cast<int>(std::thread::hardware_concurrency());  // more cores than a cpu_set_t has
}

}  // namespace

int available_cores() {
  const auto cores = std::max(1, cores_of_affinity());
  return std::min(cores, cores_of_quotas().value_or(cores));
}

int threads_or_cores(int threads) {
  return threads > 0 ? threads : available_cores();
}

std::optional<int> cores_of_quotas(const fs::path& root) {
  std::optional<int> least;
  std::ifstream groups(root / "proc/self/cgroup");
  // Lines are "0::/group" of v2, and "3:cpu,cpuacct:/group" of v1.
  for (std::string number, controllers, group; std::getline(groups, number, ':') &&
                                               std::getline(groups, controllers, ':') &&
                                               std::getline(groups, group);) {
    const bool is_v1 = ("," + controllers + ",").find(",cpu,") != std::string::npos;
    if (!controllers.empty() && !is_v1) continue;
    const auto tree = root / "sys/fs/cgroup" / (is_v1 ? "cpu" : "");
    // A container sees its own group as the tree's root, whatever the line says.
    for (auto at = fs::path(group).relative_path();; at = at.parent_path()) {
      if (const auto quota = quota_of(tree / at)) {
        const auto cores = static_cast<int>(std::ceil(std::min(*quota, 1e6)));
        least = std::min(cores, least.value_or(cores));
      }
      if (at.empty()) break;
    }
  }
  return least;
}

void side_by_side(std::int64_t count,
                  std::int64_t threads,
                  const std::function<void(std::int64_t)>& work) {
  std::atomic<std::int64_t> next = 0;
  std::mutex mutex;
  std::exception_ptr failure;
  {
    std::vector<std::jthread> workers;
    for (std::int64_t i = 0; i < std::min(threads, count); ++i) {
      workers.emplace_back([&, asked = interruption()] {
        const InterruptedBy caller(asked);
        try {
          for (auto at = next++; at < count; at = next++) work(at);
        } catch (...) {
          next = count;
          const std::lock_guard lock(mutex);
          if (!failure) failure = std::current_exception();
        }
      });
    }
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace ferry::distckpt
