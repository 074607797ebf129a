#include "models/device/capability.h"

#include <gtest/gtest.h>

#include "tests/support/expect.h"

namespace ferry::models {
namespace capability_test {

TEST(UnfitGpu, IsNamedWithWhatTheKernelsNeed) {
  const auto error = unfit_gpu("NVIDIA A100-SXM4-80GB", 8, 0);
  EXPECT_TRUE(
      support::is_error(error, ErrorKind::kDevice,
                        {"NVIDIA A100-SXM4-80GB", "compute capability 8.0", "need 9.0 or later"}));
  EXPECT_NE(error.hint().find("--device cpu"), std::string::npos);
}

}  // namespace capability_test
}  // namespace ferry::models
