// Assertions whose failures say what is where: the byte that differs, the Error that was thrown.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <exception>
#include <span>
#include <string_view>
#include <vector>

#include "distckpt/base/error.h"

namespace ferry::support {

// EXPECT_TRUE(same_bytes(expected, found)): names the first byte that differs.
::testing::AssertionResult same_bytes(std::span<const std::byte> expected,
                                      std::span<const std::byte> found);

// True if `error` is of that kind and its report holds every fragment.
::testing::AssertionResult is_error(const Error& error,
                                    ErrorKind kind,
                                    const std::vector<std::string_view>& fragments);

// EXPECT_TRUE(fails(ErrorKind::kLayout, {"lm_head", "[0:4]"}, [&] { ... })).
template <typename Body>
::testing::AssertionResult fails(ErrorKind kind,
                                 const std::vector<std::string_view>& fragments,
                                 Body&& body) {
  try {
    body();
  } catch (const Error& error) {
    return is_error(error, kind, fragments);
  } catch (const std::exception& error) {
    return ::testing::AssertionFailure() << "threw another exception: " << error.what();
  }
  return ::testing::AssertionFailure() << "threw nothing";
}

}  // namespace ferry::support
