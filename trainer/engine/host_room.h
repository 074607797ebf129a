// Memory of the host that this process could have now.
#pragma once

#include <cstdint>
#include <filesystem>

namespace ferry::trainer {

// Bytes: the least of what the kernel calls available (MemAvailable), what the control groups of
// this process leave, and what its address space has below RLIMIT_AS.
std::int64_t host_room();

// Bytes that the memory controllers of the control groups in `list` (/proc/self/cgroup) leave, and
// those of the groups around them; pages of files that nobody uses count as free. `mount` has the
// groups (/sys/fs/cgroup), of version 2, or of version 1 in its folder memory. The largest number
// where nothing is limited. (Linux: Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst)
std::int64_t cgroup_room(const std::filesystem::path& list, const std::filesystem::path& mount);

}  // namespace ferry::trainer
