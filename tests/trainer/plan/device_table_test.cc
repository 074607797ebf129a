#include "trainer/plan/device_table.h"

#include <gtest/gtest.h>

namespace ferry::trainer {
namespace device_table_test {

TEST(Devices, AreKnownByTheNameThatCudaGivesThem) {
  EXPECT_EQ(find_device("NVIDIA H100 80GB HBM3")->flops, 989e12);
  EXPECT_EQ(find_device("NVIDIA H200")->flops, 989e12);
  EXPECT_EQ(find_device("NVIDIA H20")->flops, 148e12);
  EXPECT_EQ(find_device("NVIDIA GB200")->flops, 2500e12);
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

}  // namespace device_table_test
}  // namespace ferry::trainer
