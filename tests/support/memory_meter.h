// Bytes of tensors of this thread, on the host:
//
//   const auto meter = std::make_shared<MemoryMeter>();
//   const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <cstdint>

namespace ferry::support {

class MemoryMeter : public c10::MemoryReportingInfoBase {
 public:
  std::int64_t now = 0;
  std::int64_t most = 0;

  void reportMemoryUsage(void*, std::int64_t size, std::size_t, std::size_t, c10::Device) override {
    now += size;
    most = std::max(most, now);
  }
  bool memoryProfilingEnabled() const override { return true; }
};

}  // namespace ferry::support
