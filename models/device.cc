#include "models/device.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>

namespace ferry::models {

void set_device(c10::Device device) {
  if (device.is_cuda()) c10::cuda::set_device(device.index());
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

}  // namespace ferry::models
