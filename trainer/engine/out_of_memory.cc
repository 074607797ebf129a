#include "trainer/engine/out_of_memory.h"

#include <fmt/ranges.h>

#include <map>
#include <optional>

#include "distckpt/base/error.h"
#include "models/device/device.h"
#include "models/device/memory_error.h"
#include "models/distributed/messages.h"
#include "trainer/engine/host_room.h"

namespace ferry::trainer {
namespace {

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
  return free ? *free : host_room();
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
