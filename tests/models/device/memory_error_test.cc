#include "models/device/memory_error.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <string>

namespace ferry::models {
namespace memory_error_test {

// An error in c10d's words.
c10::Error error_of_nccl(const std::string& last) {
  return {{__func__, __FILE__, __LINE__},
          "NCCL error in: NCCLUtils.cpp:93, unhandled cuda error (run with NCCL_DEBUG=INFO for "
          "details), NCCL version 2.28.9\nncclUnhandledCudaError: Call to CUDA function failed.\n"
          "Last error:\n" +
              last};
}

TEST(OutOfMemoryError, IsWhatNcclCouldNotAllocate) {
  for (const char* const last :
       {"Failed to CUDA calloc async 16 bytes", "Failed to CUDA malloc 1048576 bytes",
        "Cuda failure 2 'out of memory'"})
    EXPECT_TRUE(is_out_of_memory(error_of_nccl(last))) << last;
}

TEST(OutOfMemoryError, IsNoOtherFailureOfNccl) {
  EXPECT_FALSE(is_out_of_memory(error_of_nccl("Cuda failure 700 'an illegal memory access'")));
}

TEST(OutOfMemoryError, SaysWhatNcclAskedFor) {
  EXPECT_EQ(asked_for(error_of_nccl("Failed to CUDA calloc async 16 bytes\nmore")),
            "failed to CUDA calloc async 16 bytes");
}

TEST(OutOfMemoryError, SaysWhatLibTorchAskedFor) {
  const c10::Error error({__func__, __FILE__, __LINE__},
                         "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has\nmore");
  EXPECT_EQ(asked_for(error), "tried to allocate 2.00 GiB. GPU 0 has");
}

}  // namespace memory_error_test
}  // namespace ferry::models
