// Memory that could not be had: which buffer it was for, and what would fit.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "models/distributed/process_group.h"
#include "trainer/plan/memory_advice.h"

namespace ferry::trainer {

// Bytes that could be allocated now: of a GPU the free ones, of the host host_room().
std::int64_t room(c10::Device device);

// Runs `body`. Where it runs out of memory, of the device or of the host, throws OutOfMemory
// (models/device/memory_error.h) that names the buffer.
void allocating(c10::Device device,
                const std::function<Buffer()>& describe,
                const std::function<void()>& body);

// Notes of all ranks, each text once, with the ranks that have it: "ranks 0, 2: ...". Called by
// all.
std::vector<std::string> gather_notes(const models::ProcessGroup& ranks,
                                      const std::vector<std::string>& mine);

}  // namespace ferry::trainer
