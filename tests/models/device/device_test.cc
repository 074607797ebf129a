#include "models/device/device.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <cstdint>

#include "tests/models/cuda_fixture.h"

namespace ferry::models {
namespace {

constexpr std::int64_t kGiB = std::int64_t{1} << 30;

class DeviceMemory : public CudaKernels {
 protected:
  void TearDown() override {
    if (at::hasCUDA()) leave_free(device_, 0);
  }
  at::Tensor gib(std::int64_t count) const {
    return at::empty({count * kGiB}, at::TensorOptions().device(device_).dtype(at::kByte));
  }
  c10::Device device_{c10::kCUDA, 0};
};

TEST_F(DeviceMemory, IsLeftToOthers) {
  release_cached_memory(device_);
  leave_free(device_, *total_memory(device_) - 2 * kGiB);
  EXPECT_THROW(gib(3), c10::OutOfMemoryError);
  EXPECT_NO_THROW(gib(1));
  // The allocator gives back what it kept of the first, rather than fail.
  { const auto first = gib(1); }
  EXPECT_NO_THROW(gib(2));
}

}  // namespace
}  // namespace ferry::models
