#include "distckpt/base/nearest_name.h"

#include <gtest/gtest.h>

namespace ferry {
namespace nearest_name_test {

TEST(Nearest, CountsEdits) {
  EXPECT_EQ(nearest("kitten", {"mitten", "sitting"}), "mitten");
  EXPECT_EQ(nearest("abc", {"abd", "abc"}), "abc");
  EXPECT_EQ(nearest("abc", {"xyz"}), std::nullopt);
  EXPECT_EQ(nearest("", {"ab", "abc"}), "ab");
}

}  // namespace nearest_name_test
}  // namespace ferry
