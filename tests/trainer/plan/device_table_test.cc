#include "trainer/plan/device_table.h"

#include <gtest/gtest.h>

#include <array>

namespace ferry::trainer {
namespace device_table_test {

TEST(Devices, AreKnownByTheNameThatCudaGivesThem) {
  EXPECT_EQ(find_device("NVIDIA H100 80GB HBM3")->flops, 989e12);
  EXPECT_EQ(find_device("NVIDIA H200")->flops, 989e12);
  EXPECT_EQ(find_device("NVIDIA H20")->flops, 148e12);
  EXPECT_EQ(find_device("NVIDIA GB200")->flops, 2500e12);
  EXPECT_EQ(find_device("NVIDIA GB300")->name, "GB300");
  EXPECT_EQ(find_device("NVIDIA B300 SXM6 AC")->name, "B300");
  EXPECT_EQ(find_device("NVIDIA GH200 480GB")->name, "GH200");
  EXPECT_EQ(find_device("NVIDIA A100-SXM4-80GB")->name, "A100");
}

TEST(Devices, AreKnownInSmallLetters) {
  EXPECT_EQ(find_device("h200")->name, "H200");
}

TEST(Devices, OfOtherNamesAreNotKnown) {
  EXPECT_FALSE(find_device("NVIDIA GeForce GTX 1080"));
  EXPECT_FALSE(find_device("NVIDIA XH200"));
  EXPECT_FALSE(find_device("NVIDIA H2000"));
  EXPECT_FALSE(find_device(""));
}

// Ranks on different GPUs would choose other settings each, were every one to plan with its own.
TEST(Devices, OfSeveralKindsArePlannedForAsTheSlowest) {
  const auto h20 = *find_device("H20"), a100 = *find_device("A100");
  const auto slowest = slowest_of(std::array{h20, a100, h20});
  EXPECT_EQ(slowest.name, "H20 or A100");
  EXPECT_EQ(slowest.memory, a100.memory);
  EXPECT_EQ(slowest.flops, h20.flops);
  EXPECT_EQ(slowest.memory_rate, a100.memory_rate);
  EXPECT_EQ(slowest.link_rate, a100.link_rate);
  EXPECT_EQ(slowest.host_rate, a100.host_rate);
  EXPECT_EQ(slowest_of(std::array{h20, DeviceSpec{.name = "GPU", .memory = 1}}).flops, 0);
  EXPECT_EQ(slowest_of(std::array{h20, h20}).name, "H20");
}

}  // namespace device_table_test
}  // namespace ferry::trainer
