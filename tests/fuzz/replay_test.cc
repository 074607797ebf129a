// Every seed, and every input that a fuzzer found a defect with, through the targets as they are
// compiled for everybody: no clang, no sanitizer.
#include <gtest/gtest.h>

#include <cstdlib>
#include <exception>
#include <filesystem>
#include <string>

#include "distckpt/storage/file_io.h"
#include "tests/fuzz/targets.h"

namespace ferry::fuzz {
namespace {

namespace fs = std::filesystem;

fs::path fuzz_folder() {
  const char* const root = std::getenv("FERRY_SOURCE_ROOT");
  return root == nullptr ? fs::path("tests/fuzz") : fs::path(root) / "tests/fuzz";
}

class FuzzReplay : public testing::TestWithParam<Target> {
 protected:
  // The number of inputs in seeds/TARGET or found/TARGET.
  static int replay(std::string_view folder) {
    const auto inputs = fuzz_folder() / folder / GetParam().name;
    if (!fs::exists(inputs)) return 0;
    int count = 0;
    for (const auto& entry : fs::directory_iterator(inputs)) {
      SCOPED_TRACE(entry.path().string());
      ++count;
      const auto input = distckpt::read_text(entry.path());
      try {
        GetParam().run(input);
      } catch (const std::exception& error) {
        ADD_FAILURE() << error.what();
      }
    }
    return count;
  }
};

TEST_P(FuzzReplay, TakesOrRefusesEverySeed) {
  EXPECT_GT(replay("seeds"), 0);
}

TEST_P(FuzzReplay, TakesOrRefusesEveryInputThatWasADefectOnce) {
  replay("found");
}

INSTANTIATE_TEST_SUITE_P(Targets,
                         FuzzReplay,
                         testing::ValuesIn(targets().begin(), targets().end()),
                         [](const auto& target) { return std::string(target.param.name); });

}  // namespace
}  // namespace ferry::fuzz
