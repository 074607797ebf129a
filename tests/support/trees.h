// Folders compared.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>

namespace ferry::support {

// EXPECT_TRUE(same_tree(expected, found)): names the first file that is not the same, byte for
// byte.
::testing::AssertionResult same_tree(const std::filesystem::path& expected,
                                     const std::filesystem::path& found);

}  // namespace ferry::support
