#include "trainer/engine/host_room.h"

#include <malloc.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

namespace ferry::trainer {
namespace {

constexpr auto kUnlimited = std::numeric_limits<std::int64_t>::max();

std::int64_t available_memory() {
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    long long kib = 0;
    if (std::sscanf(line.c_str(), "MemAvailable: %lld kB", &kib) == 1) return kib << 10;
  }
  return kUnlimited;
}

std::int64_t below_address_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return kUnlimited;
  std::int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  // Memory that was given back to the heap is still this process's.
  const auto on_heap = static_cast<std::int64_t>(::mallinfo2().fordblks);
  return static_cast<std::int64_t>(limit.rlim_cur) - pages * ::sysconf(_SC_PAGESIZE) + on_heap;
}

// The files of a memory controller.
struct MemoryFiles {
  std::string_view limit{}, usage{}, unused_files{};  // the last: a line of memory.stat
};
constexpr MemoryFiles kVersion2{"memory.max", "memory.current", "inactive_file"};
constexpr MemoryFiles kVersion1{"memory.limit_in_bytes", "memory.usage_in_bytes",
                                "total_inactive_file"};

// Nothing where the file is not there, or says "max".
std::optional<std::int64_t> number_in(const std::filesystem::path& file) {
  std::int64_t number = 0;
  if (std::ifstream(file) >> number) return number;
  return std::nullopt;
}

std::int64_t statistic(const std::filesystem::path& file, std::string_view wanted) {
  std::ifstream lines(file);
  std::string name;
  std::int64_t number = 0;
  while (lines >> name >> number)
    if (name == wanted) return number;
  return 0;
}

// The room of a group and of those around it, up to `mount`.
std::int64_t room_up_to(const std::filesystem::path& mount,
                        std::filesystem::path group,
                        const MemoryFiles& files) {
  auto least = kUnlimited;
  while (true) {
    const auto folder = mount / group;
    const auto limit = number_in(folder / files.limit), usage = number_in(folder / files.usage);
    if (limit && usage)
      least =
          std::min(least, *limit - *usage + statistic(folder / "memory.stat", files.unused_files));
    if (group.empty()) return least;
    group = group.parent_path();
  }
}

}  // namespace

std::int64_t cgroup_room(const std::filesystem::path& list, const std::filesystem::path& mount) {
  auto least = kUnlimited;
  std::ifstream lines(list);
  for (std::string line; std::getline(lines, line);) {  // number:controllers:/group
    const auto first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const auto controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const auto group = std::filesystem::path(line.substr(second + 1)).relative_path();
    if (controllers == ",,")
      least = std::min(least, room_up_to(mount, group, kVersion2));
    else if (controllers.find(",memory,") != std::string::npos)
      least = std::min(least, room_up_to(mount / "memory", group, kVersion1));
  }
  return std::max<std::int64_t>(0, least);
}

std::int64_t host_room() {
  return std::max<std::int64_t>(0, std::min({available_memory(), below_address_limit(),
                                             cgroup_room("/proc/self/cgroup", "/sys/fs/cgroup")}));
}

}  // namespace ferry::trainer
