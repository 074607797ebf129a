#include "tests/support/expect.h"

#include <algorithm>

namespace ferry::support {

::testing::AssertionResult same_bytes(std::span<const std::byte> expected,
                                      std::span<const std::byte> found) {
  const auto [e, f] = std::ranges::mismatch(expected, found);
  if (e == expected.end() && f == found.end()) return ::testing::AssertionSuccess();
  const auto at = e - expected.begin();
  const auto text = [](std::span<const std::byte> bytes, auto byte) {
    return byte == bytes.end() ? "the end" : fmt::format("{:02x}", std::to_integer<int>(*byte));
  };
  return ::testing::AssertionFailure()
         << fmt::format("byte {} is {}, expected {} ({} bytes, expected {})", at, text(found, f),
                        text(expected, e), found.size(), expected.size());
}

::testing::AssertionResult is_error(const Error& error,
                                    ErrorKind kind,
                                    const std::vector<std::string_view>& fragments) {
  const auto report = error.report();
  if (error.kind() != kind) {
    return ::testing::AssertionFailure() << "an error of kind " << to_string(error.kind())
                                         << ", expected " << to_string(kind) << ":\n"
                                         << report;
  }
  for (const auto fragment : fragments) {
    if (report.find(fragment) == std::string::npos) {
      return ::testing::AssertionFailure() << "says nothing of \"" << fragment << "\":\n" << report;
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace ferry::support
