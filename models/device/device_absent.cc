#include "distckpt/base/error.h"
#include "models/device/device.h"

namespace ferry::models {

// clang-format off
void set_device(c10::Device device) { require(!device.is_cuda(), ErrorKind::kDevice, "this build has no CUDA: it runs on the host alone"); }
void synchronize(c10::Device) {}
void reset_peak_memory(c10::Device) {}
std::int64_t peak_memory(c10::Device) { return 0; }
std::int64_t peak_reserved_memory(c10::Device) { return 0; }
void release_cached_memory(c10::Device) {}
void leave_free(c10::Device, std::int64_t) {}
void pin(void*, std::size_t) {}
void unpin(void*) {}
void start_cuda_profiler() {}
void stop_cuda_profiler() {}
int num_devices() { return 0; }
std::string device_name(c10::Device) { return ""; }
std::optional<std::int64_t> free_memory(c10::Device) { return std::nullopt; }
std::optional<std::int64_t> total_memory(c10::Device) { return std::nullopt; }
// clang-format on

}  // namespace ferry::models
