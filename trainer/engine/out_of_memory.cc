#include "trainer/engine/out_of_memory.h"

#include <fmt/ranges.h>
#include <malloc.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <limits>
#include <map>
#include <optional>

#include "distckpt/base/error.h"
#include "models/device/device.h"
#include "models/device/memory_error.h"
#include "models/distributed/messages.h"

namespace ferry::trainer {
namespace {

// The machine's, by the kernel's estimate.
std::int64_t available_memory() {
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    long long kib = 0;
    if (std::sscanf(line.c_str(), "MemAvailable: %lld kB", &kib) == 1) return kib << 10;
  }
  return std::numeric_limits<std::int64_t>::max();
}

std::int64_t below_address_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
    return std::numeric_limits<std::int64_t>::max();
  std::int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  // Memory that was given back to the heap is still this process's.
  const auto on_heap = static_cast<std::int64_t>(::mallinfo2().fordblks);
  return static_cast<std::int64_t>(limit.rlim_cur) - pages * ::sysconf(_SC_PAGESIZE) + on_heap;
}

// On its way to whoever knows what would fit.
struct NoRoom {
  std::string name{};
  std::string said{};
};

[[noreturn]] void fail(c10::Device device, const Buffer& buffer, const NoRoom& cause) {
  if (!buffer.what_fits) throw cause;
  models::release_cached_memory(device);
  const auto free = room(device);
  throw models::OutOfMemory(
      ErrorKind::kDevice,
      fmt::format("out of memory for {}: {} ({} are free of {} without it)", cause.name, cause.said,
                  in_words(free), device.is_cuda() ? "the GPU" : "the host"),
      buffer.what_fits(free));
}

}  // namespace

std::int64_t room(c10::Device device) {
  const auto free = models::free_memory(device);
  return std::max<std::int64_t>(0,
                                free ? *free : std::min(available_memory(), below_address_limit()));
}

void allocating(c10::Device device,
                const std::function<Buffer()>& describe,
                const std::function<void()>& body) {
  std::optional<NoRoom> cause;
  std::string said;
  try {
    return body();
  } catch (const NoRoom& inner) {
    cause = inner;
  } catch (const std::exception& error) {
    if (!models::is_out_of_memory(error)) throw;
    said = models::asked_for(error);
  }
  // The memory that the exception held is free by now.
  const auto buffer = describe();
  fail(device, buffer, cause ? *cause : NoRoom{.name = buffer.name, .said = said});
}

std::vector<std::string> gather_notes(const models::ProcessGroup& ranks,
                                      const std::vector<std::string>& mine) {
  std::map<std::string, std::vector<std::size_t>> ranks_of;
  const auto all = models::gather(ranks, mine);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    for (const auto& note : all[rank]) ranks_of[note].push_back(rank);
  }
  std::vector<std::string> notes;
  for (const auto& [note, of] : ranks_of)
    notes.push_back(
        fmt::format("rank{} {}: {}", of.size() == 1 ? "" : "s", fmt::join(of, ", "), note));
  return notes;
}

}  // namespace ferry::trainer
