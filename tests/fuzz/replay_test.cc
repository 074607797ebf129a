// Every seed, and every input that a fuzzer found a defect with, through the targets as they are
// compiled for everybody: no clang, no sanitizer.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "distckpt/storage/file_io.h"
#include "tests/fuzz/targets.h"

namespace ferry::fuzz {
namespace {

namespace fs = std::filesystem;

fs::path fuzz_folder() {
  const char* const root = std::getenv("FERRY_SOURCE_ROOT");
  return root == nullptr ? fs::path("tests/fuzz") : fs::path(root) / "tests/fuzz";
}

// Runs every input in FOLDER/TARGET, and expects some.
void replay(std::string_view folder, const Target& target) {
  int count = 0;
  for (const auto& entry : fs::directory_iterator(fuzz_folder() / folder / target.name)) {
    SCOPED_TRACE(entry.path().string());
    ++count;
    const auto input = distckpt::read_text(entry.path());
    try {
      target.run(input);
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
  }
  EXPECT_GT(count, 0);
}

// The targets that something was found with.
std::vector<Target> targets_with_defects() {
  std::vector<Target> found;
  std::ranges::copy_if(targets(), std::back_inserter(found), [](const Target& target) {
    return fs::exists(fuzz_folder() / "found" / target.name);
  });
  return found;
}

std::string name_of(const testing::TestParamInfo<Target>& info) {
  return std::string(info.param.name);
}

class FuzzReplay : public testing::TestWithParam<Target> {};

TEST_P(FuzzReplay, TakesOrRefusesEverySeed) {
  replay("seeds", GetParam());
}

INSTANTIATE_TEST_SUITE_P(Targets, FuzzReplay, testing::ValuesIn(targets()), name_of);

class FuzzReplayOfDefects : public testing::TestWithParam<Target> {};

TEST_P(FuzzReplayOfDefects, TakesOrRefusesEveryInputThatWasADefectOnce) {
  replay("found", GetParam());
}

INSTANTIATE_TEST_SUITE_P(Targets,
                         FuzzReplayOfDefects,
                         testing::ValuesIn(targets_with_defects()),
                         name_of);

TEST(FuzzFolders, AreEachOfATarget) {
  for (const auto* folder : {"seeds", "found"}) {
    for (const auto& entry : fs::directory_iterator(fuzz_folder() / folder)) {
      const auto name = entry.path().filename().string();
      EXPECT_TRUE(std::ranges::any_of(targets(), [&](const Target& one) {
        return one.name == name;
      })) << entry.path();
    }
  }
  EXPECT_FALSE(targets_with_defects().empty());
}

}  // namespace
}  // namespace ferry::fuzz
