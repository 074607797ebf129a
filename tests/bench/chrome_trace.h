// Records the work of host and device as a file for Chrome's tracing.
#pragma once

#include <torch/csrc/autograd/profiler_kineto.h>

#include <functional>
#include <set>
#include <string>

#include "models/device/device.h"

namespace ferry {

inline void write_trace(const std::function<void()>& body,
                        at::Device device,
                        const std::string& file) {
  namespace profiler = torch::autograd::profiler;
  const std::set<torch::profiler::impl::ActivityType> activities{
      torch::profiler::impl::ActivityType::CPU, torch::profiler::impl::ActivityType::CUDA};
  const profiler::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities);
  body();
  models::synchronize(device);
  profiler::disableProfiler()->save(file);
}

}  // namespace ferry
