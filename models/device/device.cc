#include "models/device/device.h"

#include <ATen/Context.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <cuda_profiler_api.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <new>

#include "distckpt/base/error.h"
#include "models/device/capability.h"
#include "models/device/memory_error.h"

namespace ferry::models {

void set_device(c10::Device device) {
  if (!device.is_cuda()) return;
  int count = 0;
  const auto status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess || device.index() >= count) {
    throw Error(ErrorKind::kDevice,
                status == cudaSuccess
                    ? fmt::format("GPU {} is asked for, and there are {}", device.index(), count)
                    : fmt::format("there is no GPU: {}", cudaGetErrorString(status)),
                "run on the host: --device cpu, of ferry train trainer.device=cpu");
  }
  int major = 0, minor = 0;
  (void)cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device.index());
  (void)cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device.index());
  if (major < kKernelsMajor) throw unfit_gpu(device_name(device), major, minor);
  or_out_of_memory(fmt::format("a CUDA context on GPU {}", device.index()),
                   "another program holds the GPU's memory: nvidia-smi names it",
                   [&] { c10::cuda::set_device(device.index()); });
}

void synchronize(c10::Device device) {
  if (device.is_cuda()) c10::cuda::device_synchronize();
}

void reset_peak_memory(c10::Device device) {
  if (device.is_cuda()) c10::cuda::CUDACachingAllocator::resetPeakStats(device.index());
}

std::int64_t peak_memory(c10::Device device) {
  if (!device.is_cuda()) return 0;
  return c10::cuda::CUDACachingAllocator::getDeviceStats(device.index()).allocated_bytes[0].peak;
}

std::int64_t peak_reserved_memory(c10::Device device) {
  if (!device.is_cuda()) return 0;
  return c10::cuda::CUDACachingAllocator::getDeviceStats(device.index()).reserved_bytes[0].peak;
}

void release_cached_memory(c10::Device device) {
  if (!device.is_cuda()) return;
  synchronize(device);
  c10::cuda::CUDACachingAllocator::emptyCache();
}

void leave_free(c10::Device device, std::int64_t bytes) {
  const auto total = total_memory(device);
  if (!total) return;
  at::globalContext().lazyInitDevice(c10::kCUDA);
  // The allocator takes whole bytes of the share: half a one more is no byte less.
  const auto share = (static_cast<double>(*total - bytes) + 0.5) / static_cast<double>(*total);
  c10::cuda::CUDACachingAllocator::setMemoryFraction(std::clamp(share, 0.0, 1.0), device.index());
}

void pin(void* data, std::size_t bytes) {
  const auto status = cudaHostRegister(data, bytes, cudaHostRegisterPortable);
  if (status != cudaSuccess) (void)cudaGetLastError();  // else the next launch has it
  if (status == cudaErrorMemoryAllocation) throw std::bad_alloc();
  require(status == cudaSuccess, ErrorKind::kDevice, "pinning {} bytes of the host: {}", bytes,
          cudaGetErrorString(status));
}

void unpin(void* data) {
  cudaHostUnregister(data);
}

void start_cuda_profiler() {
  cudaProfilerStart();
}

void stop_cuda_profiler() {
  cudaProfilerStop();
}

int num_devices() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

std::string device_name(c10::Device device) {
  cudaDeviceProp properties{};
  if (!device.is_cuda() || cudaGetDeviceProperties(&properties, device.index()) != cudaSuccess)
    return "";
  return properties.name;
}

std::optional<std::int64_t> free_memory(c10::Device device) {
  if (!device.is_cuda()) return std::nullopt;
  set_device(device);
  std::size_t available = 0;
  std::size_t total = 0;
  if (cudaMemGetInfo(&available, &total) != cudaSuccess) return std::nullopt;
  return static_cast<std::int64_t>(available);
}

std::optional<std::int64_t> total_memory(c10::Device device) {
  if (!device.is_cuda()) return std::nullopt;
  set_device(device);
  std::size_t available = 0;
  std::size_t total = 0;
  if (cudaMemGetInfo(&available, &total) != cudaSuccess) return std::nullopt;
  return static_cast<std::int64_t>(total);
}

}  // namespace ferry::models
