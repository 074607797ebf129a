#include "distckpt/filenames.h"

#include <gtest/gtest.h>

#include <string_view>

#include "distckpt/error.h"
#include "tests/support/expect.h"

namespace ferry::distckpt {
namespace {

using support::fails;

TEST(Filenames, OfSafetensorsCountFromOne) {
  EXPECT_EQ(safetensors_filename(0, 1), "model.safetensors");
  EXPECT_EQ(safetensors_filename(0, 4), "model-00001-of-00004.safetensors");
  EXPECT_EQ(safetensors_filename(162, 163), "model-00163-of-00163.safetensors");
}

TEST(Filenames, OfIterationsThereAndBackAreTheSame) {
  for (const auto number : {0LL, 10LL, 9'999'999LL, 12'345'678LL}) {
    const Iteration iteration{.number = number};
    EXPECT_EQ(parse_iteration_folder(iteration_folder(iteration)), iteration);
    EXPECT_EQ(parse_iteration(iteration_text(iteration)), iteration);
  }
  EXPECT_EQ(iteration_folder({.number = 10}), "iter_0000010");
  EXPECT_EQ(iteration_folder({.number = 12'345'678}), "iter_12345678");
  EXPECT_EQ(iteration_folder({}), "release");
  EXPECT_EQ(parse_iteration_folder("release"), Iteration{});
  EXPECT_EQ(parse_iteration("release"), Iteration{});
}

TEST(Filenames, OfOtherThingsAreNoIterations) {
  for (const char* name :
       {"", "iter_", "iter_10", "iter_000001x", "iter_-000010", "iter_release",
        "iter_99999999999999999999", "Release", "xiter_0000010", "iter_00 0010"}) {
    EXPECT_EQ(parse_iteration_folder(name), std::nullopt) << name;
  }
  for (const char* text : {"", "-1", "10\n", "1e3", "0x10", "10 ", "99999999999999999999"}) {
    EXPECT_EQ(parse_iteration(text), std::nullopt) << text;
  }
}

TEST(Filenames, OfRanksAndWorkFolders) {
  EXPECT_EQ(distcp_filename(3), "__3_0.distcp");
  EXPECT_EQ(work_folder("/a/b/out"), "/a/b/.out.ferry");
  EXPECT_EQ(work_folder("out"), ".out.ferry");
}

TEST(RequirePlainFilename, RefusesEveryWayOutOfTheFolder) {
  using namespace std::string_view_literals;
  for (const auto name :
       {""sv, "."sv, ".."sv, "a/b"sv, "/etc/passwd"sv, "../a"sv, "a/"sv, "a\0b"sv}) {
    EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"index.json"}, [&] {
      require_plain_filename(name, "index.json");
    })) << name;
  }
  for (const auto name : {"a"sv, "..a"sv, "..."sv, "__0_0.distcp"sv, ".metadata"sv}) {
    EXPECT_NO_THROW(require_plain_filename(name, "index.json")) << name;
  }
}

}  // namespace
}  // namespace ferry::distckpt
