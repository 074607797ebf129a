#include "tests/support/temp_dir.h"

#include <cerrno>
#include <cstdlib>
#include <string>
#include <system_error>

namespace ferry::support {

TempDir::TempDir() {
  auto name = (std::filesystem::temp_directory_path() / "ferry-test-XXXXXX").string();
  if (::mkdtemp(name.data()) == nullptr) {
    throw std::system_error(errno, std::generic_category(), name);
  }
  path_ = name;
}

TempDir::~TempDir() {
  std::error_code ignored;  // a test that fails has more to say than this
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace ferry::support
