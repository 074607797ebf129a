// The number of threads that work at a time, and the same work by several of them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>

namespace ferry::distckpt {

// The cores that this process may use, at least 1: those of its affinity (taskset, cpusets), or
// fewer where cores_of_quotas() says so.
int available_cores();

// `threads`, or one per available core if it is 0.
int threads_or_cores(int threads);

// The CPU time that the control groups of this process grant, in cores, a part of one counted as
// one; nothing without a quota. The limits of Kubernetes and docker --cpus are such, of cgroup v1
// or v2. `root` holds the kernel's /proc and /sys.
std::optional<int> cores_of_quotas(const std::filesystem::path& root = "/");

// Calls work(0) to work(count - 1), by up to `threads` threads, in about that order. After one has
// thrown no other is begun, and the first of what was thrown is thrown. The threads have the
// interruption() of the caller's.
void side_by_side(std::int64_t count,
                  std::int64_t threads,
                  const std::function<void(std::int64_t)>& work);

}  // namespace ferry::distckpt
