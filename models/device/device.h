// The device of this process: choosing it, waiting for it, its memory. Most functions do nothing
// for the host.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace ferry::models {

// Sets the device that kernels of this thread run on. Throws Error(kDevice) if it does not exist,
// or this build's kernels do not run on it.
void set_device(c10::Device device);
void synchronize(c10::Device device);
void reset_peak_memory(c10::Device device);
std::int64_t peak_memory(c10::Device device);  // bytes in use at most since then, by LibTorch
std::int64_t peak_reserved_memory(c10::Device device);  // and those that it kept for later use

// Gives what LibTorch keeps for later use back to the device, once its work is done.
void release_cached_memory(c10::Device device);

// Leaves `bytes` of the device to what does not allocate through LibTorch: contexts, NCCL. LibTorch
// gives back what it keeps for later use before it takes more than the rest, and fails then.
void leave_free(c10::Device device, std::int64_t bytes);

// Pins memory of the host: devices then copy from and to it beside what else they do. Nothing
// without CUDA. Throws std::bad_alloc where the system pins no more, else Error(kDevice).
void pin(void* data, std::size_t bytes);
void unpin(void* data);

// Begin and end what a profiler that runs this program records: nsys profile -c cudaProfilerApi.
void start_cuda_profiler();
void stop_cuda_profiler();

int num_devices();  // GPUs that this process sees

// CUDA's name of the device: "NVIDIA H100 80GB HBM3". Empty for the host.
std::string device_name(c10::Device device);

// Free bytes of the device, and all that it has; nullopt for the host.
std::optional<std::int64_t> free_memory(c10::Device device);
std::optional<std::int64_t> total_memory(c10::Device device);

}  // namespace ferry::models
