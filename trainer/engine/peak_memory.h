// The memory of GPUs that a step took at most, over ranks.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

#include "models/distributed/process_group.h"

namespace ferry::trainer {

// Bytes since models::reset_peak_memory(); 0 on the host.
struct PeakMemory {
  std::int64_t allocated = 0;
  std::int64_t reserved = 0;  // with what LibTorch kept for later use

  void add(const PeakMemory& other);  // of other ranks
};

// The most of any of these ranks. Called by all of them.
PeakMemory peak_memory(const models::ProcessGroup& ranks, c10::Device device);

}  // namespace ferry::trainer
