#include "trainer/metrics/performance.h"

#include <gtest/gtest.h>

namespace ferry::trainer {
namespace performance_test {

TEST(PeakFlops, AreKnownByTheNameOfAGpu) {
  EXPECT_EQ(peak_flops("NVIDIA H100 80GB HBM3"), 989e12);
  EXPECT_EQ(peak_flops("NVIDIA H200"), 989e12);
  EXPECT_EQ(peak_flops("NVIDIA H20"), 148e12);
  EXPECT_EQ(peak_flops("NVIDIA GB200"), 2500e12);
  EXPECT_EQ(peak_flops("NVIDIA GeForce GTX 1080"), std::nullopt);
}

}  // namespace performance_test
}  // namespace ferry::trainer
