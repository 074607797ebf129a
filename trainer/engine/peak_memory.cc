#include "trainer/engine/peak_memory.h"

#include <ATen/ops/tensor.h>

#include <algorithm>

#include "models/device/device.h"

namespace ferry::trainer {

void PeakMemory::add(const PeakMemory& other) {
  allocated = std::max(allocated, other.allocated);
  reserved = std::max(reserved, other.reserved);
}

PeakMemory peak_memory(const models::ProcessGroup& ranks, c10::Device device) {
  const auto mine =
      at::tensor({models::peak_memory(device), models::peak_reserved_memory(device)}, at::kLong);
  const auto most = ranks.all_reduce_max(mine.to(device)).cpu();
  return {.allocated = most[0].item<std::int64_t>(), .reserved = most[1].item<std::int64_t>()};
}

}  // namespace ferry::trainer
