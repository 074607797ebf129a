#include "tests/support/trees.h"

#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/models/tiny_model.h"

namespace ferry::support {

::testing::AssertionResult same_tree(const std::filesystem::path& expected,
                                     const std::filesystem::path& found) {
  const auto left = read_tree(expected);
  const auto right = read_tree(found);
  for (const auto& [name, content] : left) {
    const auto other = right.find(name);
    if (other == right.end()) return ::testing::AssertionFailure() << name << " is missing";
    const auto same = same_bytes(distckpt::as_bytes(content), distckpt::as_bytes(other->second));
    if (!same) return ::testing::AssertionFailure() << name << ": " << same.message();
  }
  if (left.size() != right.size())
    return ::testing::AssertionFailure() << "there are more files than expected";
  return ::testing::AssertionSuccess();
}

}  // namespace ferry::support
