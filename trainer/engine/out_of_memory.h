// Memory that could not be had: which buffer it was for, and what would fit.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <string>

namespace ferry::trainer {

// Bytes that could be allocated now: of a GPU the free ones, of the host what is available below
// the process's limit (RLIMIT_AS) and the machine's memory.
std::int64_t room(c10::Device device);

// "3.2 GiB", "17 MiB".
std::string in_words(std::int64_t bytes);

// Memory that is being allocated.
struct Buffer {
  std::string name{};  // "the gradients, 3.2 GiB"
  // Says what would fit into so many bytes; called when all that `body` had is free again. Empty
  // inside of another allocating(), which knows.
  std::function<std::string(std::int64_t room)> what_fits{};
};

// Runs `body`. Where it runs out of memory, of the device or of the host, throws OutOfMemory
// (models/device/memory_error.h) that names the buffer.
void allocating(c10::Device device,
                const std::function<Buffer()>& describe,
                const std::function<void()>& body);

}  // namespace ferry::trainer
