#include "distckpt/base/trimmed.h"

#include <gtest/gtest.h>

namespace ferry {
namespace trimmed_test {

TEST(Trimmed, TakesBlanksOffBothEnds) {
  EXPECT_EQ(trimmed(" \t\r\na b\n "), "a b");
}

TEST(Trimmed, LeavesATextWithoutBlanksAsItIs) {
  EXPECT_EQ(trimmed("a"), "a");
}

TEST(Trimmed, IsEmptyWhereAllIsBlank) {
  for (const auto* text : {"", " ", "\r\n\t"}) EXPECT_EQ(trimmed(text), "");
}

TEST(Trimmed, TakesOtherBlanksWhereAsked) {
  EXPECT_EQ(trimmed(" \na\n ", " \t"), "\na\n");
}

}  // namespace trimmed_test
}  // namespace ferry
