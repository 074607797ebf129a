#include "distckpt/storage/filenames.h"

#include <gtest/gtest.h>

#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "distckpt/base/error.h"
#include "tests/support/expect.h"

namespace ferry::distckpt {
namespace filenames_test {

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

TEST(Filenames, OfRankFolders) {
  EXPECT_EQ(parse_rank_folder("mp_rank_00"), std::vector<int>{0});
  EXPECT_EQ(parse_rank_folder("mp_rank_01_003"), (std::vector<int>{1, 3}));
  EXPECT_EQ(parse_rank_folder("mp_rank_101_003_1024"), (std::vector<int>{101, 3, 1024}));
  for (const char* name : {"", "mp_rank_", "mp_rank_0", "mp_rank_00_", "mp_rank_00_01",
                           "mp_rank_x0", "mp_rank_00_000_000_000", "mp_rank_-1", "mp_rank_00x"}) {
    EXPECT_EQ(parse_rank_folder(name), std::nullopt) << name;
  }
}

TEST(Filenames, OfVerl) {
  EXPECT_EQ(parse_step_folder("global_step_5"), (Iteration{.number = 5}));
  for (const char* name : {"global_step_", "global_step_release", "global_step_-1", "step_5"})
    EXPECT_EQ(parse_step_folder(name), std::nullopt) << name;
  const auto rank = parse_fsdp_filename("model_world_size_8_rank_3.pt");
  ASSERT_TRUE(rank.has_value());
  EXPECT_EQ(std::pair(rank->world_size, rank->rank), std::pair(8, 3));
  for (const char* name : {"model_world_size_8_rank_3", "model_world_size_8_rank_-3.pt",
                           "model_world_size_08_rank_3.pt", "model_world_size_8_rank_3.pt.tmp",
                           "optim_world_size_8_rank_3.pt", "model_world_size_"}) {
    EXPECT_FALSE(parse_fsdp_filename(name).has_value()) << name;
  }
}

TEST(Filenames, OfTorchModels) {
  for (const char* name :
       {"pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin"}) {
    EXPECT_TRUE(is_torch_model_filename(name)) << name;
  }
  for (const char* name : {"training_args.bin", "pytorch_model.bin.bak", "model.bin", ""})
    EXPECT_FALSE(is_torch_model_filename(name)) << name;
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

TEST(Filenames, TellAFileOfADistributedCheckpoint) {
  for (const char* name : {"__0_0.distcp", "__12_3.distcp"}) EXPECT_TRUE(is_distcp_filename(name));
  for (const char* name : {"__0_0.distcp.orig", "__0.distcp", "__a_0.distcp", "0_0.distcp", "__",
                           "__.distcp", ".distcp", ""})
    EXPECT_FALSE(is_distcp_filename(name)) << name;
}

}  // namespace filenames_test
}  // namespace ferry::distckpt
